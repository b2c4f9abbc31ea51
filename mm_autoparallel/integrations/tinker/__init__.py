"""Tinker (Ascend/mstt, profiler/tinker): its folders of measured blocks, its search and simulation, its files."""
