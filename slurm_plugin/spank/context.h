/* What the plugin does in each Slurm context; spank.c chooses. */
#ifndef MURI_CONTEXT_H
#define MURI_CONTEXT_H

#include <slurm/spank.h>

/*
 * Environment variables. Slurm exports an entry NAME of the job control environment as
 * SLURM_SPANK_NAME, and keeps SLURM_* variables whatever --export says.
 */
#define MURI_CONTROL_NAME "MURI_JOB"
#define MURI_CARRIER "SLURM_SPANK_MURI_JOB"
#define MURI_JOB_VARIABLE "MURI_JOB"
#define MURI_FACTS_NAME "MURI_FACTS"
#define MURI_FACTS_CARRIER "SLURM_SPANK_MURI_FACTS"

/* The variables in which Slurm exports the options of a job: a fixed prefix, plugin, option. */
#define MURI_EXPORTED "SLURM_SPANK__SLURM_SPANK_OPTION_muri_muri"
#define MURI_EXPORTED_NO "SLURM_SPANK__SLURM_SPANK_OPTION_muri_no_muri"

/* sbatch, salloc and srun: register the options, forget what an outer job left in the environment. */
int muri_client_init(spank_t spank);

/* sbatch, salloc: mark the job, or remove a mark inherited from an outer job. */
int muri_allocator_post_options(spank_t spank);

/* srun: mark the step; without an option of its own a step keeps its job's mark. */
int muri_local_post_options(spank_t spank);

/* slurmstepd, as root: make the user's run directory, register the options that srun passes on. */
int muri_remote_init(spank_t spank);

/* slurmstepd, as the user: put MURI_JOB into the environment of the job. */
int muri_remote_user_init(spank_t spank);

#endif
