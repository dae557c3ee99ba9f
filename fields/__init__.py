"""How config fields are declared and checked; every other folder may import this one."""
