"""Verbs that look something up and touch no job: codes, schemas, frames, traces, past decisions."""
