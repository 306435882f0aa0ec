"""Pictures of features: maps, and images beside their neighbours."""
