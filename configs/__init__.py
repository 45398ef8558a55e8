"""The configuration schema (`configs.schema`), its loader (`configs.load`) and one YAML file per run."""
