"""recpoint: cheap, frequent, proven recovery points for recommender training."""
