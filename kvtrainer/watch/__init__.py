"""Views of a running job for people: a page in a terminal, one in a browser, and metrics."""
