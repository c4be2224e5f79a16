"""The decoder language model: a layer pattern, its parameters, and Hugging Face weights in and out."""
