"""Reports and model cards as Markdown and HTML."""
