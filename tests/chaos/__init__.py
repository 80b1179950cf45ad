"""Seeded kills and stops of every kind of process while tenants train; the bits must not notice."""
