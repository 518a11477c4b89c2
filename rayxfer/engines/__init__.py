"""Built-in engines, one module each. Loaded by name when first used, never by importing rayxfer."""
