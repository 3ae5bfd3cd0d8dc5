"""Looking things up without touching a job: codes, schemas, frames, traces, past decisions."""
