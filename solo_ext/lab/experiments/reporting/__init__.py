"""The report of a benchmark: from records to Markdown, CSV and a page."""
