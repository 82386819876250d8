"""The built-in model: pictures and questions by code, tokenizer, training, evaluation. See README.md here."""
