"""The part of the package's description that pyproject.toml can't say.

A package index shows the README alone: links to the repository's files lead nowhere there, so they become the files'
paths in the source distribution.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text("utf-8")

setup(
    long_description=re.sub(r"\[([^]]+)\]\((?!https?://|#)([^)]+)\)", r"\1 (`\2`)", README),
    long_description_content_type="text/markdown",
)
