"""Answers from rank to rank, past Ray's object store: a process group of two for every student and actor that sends."""
