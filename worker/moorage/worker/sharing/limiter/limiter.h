/* The segment that a worker shares with the processes of one attempt: its layout, which segment.py repeats.

   Every field is a 64-bit number that is read and written as a whole. The first part is written by the worker alone, the
   second by the processes of the job alone. So nobody waits for a lock that a killed process holds, and the worker needs
   no atomic step: it reads and writes the file with pread(2) and pwrite(2), since a mapping of a file that a job cuts
   short would end the worker with SIGBUS. */

#ifndef MOORAGE_LIMITER_H
#define MOORAGE_LIMITER_H

#include <stdint.h>

#define LIMITER_MAGIC 0x74696d696c726f6dull /* "morlimit" */
#define LIMITER_VERSION 2
#define LIMITER_DEVICES 16 /* of one attempt */
#define LIMITER_SLOTS 128  /* processes of one attempt that use a device at the same time */

/* An owner is a process: its pid in its own PID namespace, and its start time from /proc, in ticks. 0: no owner. */
#define LIMITER_START_BITS 42
#define LIMITER_OWNER(pid, start) \
    ((uint64_t)(pid) << LIMITER_START_BITS | ((uint64_t)(start) & ((1ull << LIMITER_START_BITS) - 1)))

/* Tokens are counted in millionths. */
#define LIMITER_TOKEN 1000000

struct limiter_slot {
    _Atomic uint64_t owner;
    _Atomic uint64_t pid_ns; /* inode of the PID namespace of the owner's pid; 0: not written yet */
    uint64_t unused[6];
    struct limiter_use {
        _Atomic uint64_t asking;   /* bytes that the process has asked for and may be refused */
        _Atomic uint64_t used;     /* bytes that it uses, by its own count */
        _Atomic uint64_t begun;    /* bytes that it began to take or to free, since the beginning */
        _Atomic uint64_t done;     /* and those of them with which the driver is done */
        _Atomic uint64_t guess[2]; /* bytes that it took by a guess, as for a context: they count until NVML has told */
        _Atomic uint64_t made[2];  /* the reading of NVML that was the newest to begin when the guess was made */
    } of[LIMITER_DEVICES];
};

/* What NVML says that a process holds of each device, beyond what it counts itself. */
struct limiter_told {
    _Atomic uint64_t owner; /* of which process that is */
    struct {
        _Atomic uint64_t beyond;  /* bytes */
        _Atomic uint64_t reading; /* the number of the reading: older guesses are in it */
    } of[LIMITER_DEVICES];
};

struct limiter_segment {
    /* written by the worker */
    uint64_t magic, version, size, devices;
    _Atomic uint64_t heartbeat;                   /* nanoseconds of CLOCK_MONOTONIC */
    _Atomic uint64_t granted[LIMITER_DEVICES];    /* tokens given since the beginning; it only grows */
    _Atomic uint64_t rate[LIMITER_DEVICES];       /* tokens that it gives a second; 0: launches need none */
    _Atomic uint64_t limit[LIMITER_DEVICES];      /* bytes; 0: no limit */
    _Atomic uint64_t context[LIMITER_DEVICES];    /* bytes that a process's context is guessed to take */
    _Atomic uint64_t beyond[LIMITER_DEVICES];     /* bytes that NVML says processes without a slot hold */
    unsigned char uuid[LIMITER_DEVICES][16];
    _Atomic uint64_t dead[LIMITER_SLOTS];         /* by slot: an owner that has ended, as the worker saw */
    _Atomic uint64_t frozen;                      /* 0: calls pass; else `waiting` when they were stopped, plus 1 */
    _Atomic uint64_t reading;                     /* the number of the newest reading of NVML that has begun */
    struct limiter_told told[LIMITER_SLOTS];      /* by slot */
    /* written by the processes of the job */
    struct {
        _Atomic uint64_t attached; /* processes that have loaded the library */
        _Atomic uint64_t high;     /* how many slots, from the first on, were ever used */
        _Atomic uint64_t refused;  /* allocations that were over the limit */
        _Atomic uint64_t opened;   /* launches without tokens, because the heartbeat was old */
        _Atomic uint64_t crowded;  /* allocations refused because all slots were taken */
        _Atomic uint64_t missed;   /* functions that were looked up in a variant without a hook */
        _Atomic uint64_t waiting;  /* calls that came while the attempt was frozen; it only grows */
        uint64_t unused[1];
    } __attribute__((aligned(64)));
    struct {
        _Atomic uint64_t taken; /* tokens taken since the beginning; it only grows */
        uint64_t unused[7];
    } bucket[LIMITER_DEVICES];
    struct limiter_slot slots[LIMITER_SLOTS];
};

#endif
