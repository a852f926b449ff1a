/* member.c: what SPANK's contexts do for a job that shares another job's GPUs. */
#ifndef MURI_MEMBER_H
#define MURI_MEMBER_H

#include <slurm/spank.h>

/* The prolog, as root: note the GPUs that a job holds on this node. */
void muri_member_prolog(spank_t spank);

/* A step's start, as root, before its tasks exist: find out whether the job has a grant. */
void muri_member_init(spank_t spank);

/* A task's start, as root, before it runs anything: open the devices. */
void muri_member_forked(spank_t spank);

/* In the task, as its user, before its program: set its variables, or end it where the grant failed. */
void muri_member_task(spank_t spank);

/* A task's end, before srun hears of it: the last one gives the step's GPUs to the job's other steps. */
void muri_member_task_ended(void);

/* A step's end, as root: put the job back into the queue where its grant failed. */
void muri_member_exit(spank_t spank);

#endif
