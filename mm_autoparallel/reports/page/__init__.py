"""The page: one HTML file that shows plans of a job to whoever opens it, without a network and without this package.

report.py says what a page holds, timelines.py how its thousands of tasks are packed, and html.py makes the file. What
it looks like is studio/web/, of which `web/` has the built script and style. The browser draws, it computes nothing.
"""
