"""Reports as Markdown and HTML."""
