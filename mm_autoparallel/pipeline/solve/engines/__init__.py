"""Where tasks are solved: in this process, in several processes of this machine, or on a Ray cluster."""
