#!/usr/bin/env bash
# Run the examples, keep what they find in examples/results, and draw it into docs/figures; takes about six minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
job() { # WORKERS SERVERS NAME RESULT OPTION...
    kvlaunch -n "$1" -s "$2" -- python "examples/$3.py" --out "examples/results/$4.json" "${@:5}"
}
job 2 2 digits digits
job 2 2 lightning_digits lightning
python examples/ray_digits.py --kill-after 12 --out examples/results/ray.json
job 2 2 cnn cnn --config examples/cnn.json
job 2 2 gan gan --config examples/gan.json
job 2 2 characters characters --steps 600
for table in sparse dense stored; do
    job 2 2 flights "flights_$table" --table "$table"
done
job 2 2 stream stream
job 2 2 embeddings embeddings
for slow in one turns; do
    for kvstore in dist_sync dist_ssp dist_async; do
        job 4 1 uneven "uneven_${slow}_$kvstore" --kvstore "$kvstore" --slow "$slow" --batch-seconds 0.05 --seconds 20
    done
done
python examples/plots.py examples/results docs/figures
