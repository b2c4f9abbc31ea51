"""A server for assistants: planning as tools of the Model Context Protocol, over standard input and output.

It needs the extra `mcp`. serve.py speaks the protocol, tools.py has the tools, which call the Python face, and
folder.py says which files they may name.
"""
