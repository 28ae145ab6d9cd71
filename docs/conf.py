"""Sphinx settings; build with ``sphinx-build -W docs out/docs`` (extra ``docs``)."""

project = "preemptbench"
author = "The preemptbench developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "preemptbench"
