"""A small convolutional network on scikit-learn's digits."""
