"""What setup.cfg cannot say: the long description is the README, whose links to files lead nowhere outside of them."""

import re
from pathlib import Path

from setuptools import setup


def without_links(text: str) -> str:
    """Put the names of files in the place of links to them; code stays as it is."""

    def name(link: "re.Match[str]") -> str:
        shown, target = link.groups()
        return f"`{target}`" if shown == target else f"{shown} (`{target}`)"

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    parts[::2] = [re.sub(r"!?\[([^]]+)\]\((?![a-z]+:|#)([^)\s]+)\)", name, part) for part in parts[::2]]
    return "".join(parts)


setup(long_description=without_links(Path(__file__).with_name("README.md").read_text(encoding="utf-8")))
