"""Pipeline orders as data: one pure function each, and the catalog of their names."""
