"""Lucene's search without Java: its English analyzer and its BM25."""
