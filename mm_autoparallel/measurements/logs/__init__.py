"""Training logs of several frameworks as measured cases: the arguments that they print, steady steps, peaks."""
