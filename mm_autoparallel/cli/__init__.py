"""The command line: one file a verb, each light to import; what a verb needs is imported when it runs."""
