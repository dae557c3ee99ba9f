"""Device mesh, sharding rules, pipelines, memory estimates and analysis of compiled steps."""
