#!/usr/bin/env bash
# Library:   MXNet 1.9.1
# Expected:  learning_rate scales the updates of AdaDelta, as it does those of every other optimizer: all take
#            learning_rate and lr_scheduler, and the Trainer's set_learning_rate says that it sets them.
# Happens:   AdaDelta ignores the rate: whatever it is, a weight of 1 with gradients of 1 is 0.990000, then 0.979741.
#            Nor is wd multiplied by it: with wd = 0.1 a tenth of the weight is lost in each update. 2.0.0b1
#            multiplies the step by the rate. AdaGrad with the same arguments is printed beside it, to show rates that count.
# Seen:      2026-11-28
# For users: warm-ups and decays of a schedule do nothing with AdaDelta on 1.9.1; a script that moves to 2.x, or to
#            numbers of 2.x elsewhere, has to choose a rate of 1.
# Needs a Python from 3.8 to 3.11 (PYTHON=...), for numpy 1.23.5, which MXNet 1.9.1 imports.
set -euo pipefail

python=${PYTHON:-python3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check mxnet==1.9.1 numpy==1.23.5

cat > "$folder/seen.py" <<'EOF'
import mxnet as mx

print("mxnet", mx.__version__)
for name in ("adadelta", "adagrad"):
    for options in ({"learning_rate": 0.001}, {"learning_rate": 1.0}, {"learning_rate": 0.001, "wd": 0.1}):
        update = mx.optimizer.get_updater(mx.optimizer.create(name, **options))
        weight, after = mx.nd.array([1.0]), []
        for _ in range(2):
            update(0, mx.nd.array([1.0]), weight)
            after.append(f"{weight.asscalar():.6f}")
        print(name, options, *after)
EOF
cat > "$folder/expected" <<'EOF'
mxnet 1.9.1
adadelta {'learning_rate': 0.001} 0.990000 0.979741
adadelta {'learning_rate': 1.0} 0.990000 0.979741
adadelta {'learning_rate': 0.001, 'wd': 0.1} 0.890001 0.790741
adagrad {'learning_rate': 0.001} 0.999000 0.998293
adagrad {'learning_rate': 1.0} 0.000000 -0.707107
adagrad {'learning_rate': 0.001, 'wd': 0.1} 0.998900 0.998093
EOF
"$folder/env/bin/python" -W ignore "$folder/seen.py" > "$folder/seen" 2> "$folder/errors" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
diff "$folder/expected" "$folder/seen"
