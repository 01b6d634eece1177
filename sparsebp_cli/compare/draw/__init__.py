"""Pictures of a comparison: PNG, SVG or PDF, in colours that colour-blind readers tell apart."""
