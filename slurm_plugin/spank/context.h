/* The plugin in sbatch, salloc and srun; spank.c chooses by Slurm context. */
#ifndef MURI_CONTEXT_H
#define MURI_CONTEXT_H

#include <slurm/spank.h>

/*
 * Entries of the job control environment, read by job_submit/muri.lua: the option's texts, those of a job that is only
 * tested, and the facts. Slurm exports an entry NAME as SLURM_SPANK_NAME, and keeps SLURM_* variables whatever --export
 * says.
 */
#define MURI_OPTION_NAME "MURI_OPTION"
#define MURI_OPTION_CARRIER "SLURM_SPANK_MURI_OPTION"
#define MURI_TESTED_NAME "MURI_TESTED"
#define MURI_FACTS_NAME "MURI_FACTS"
#define MURI_FACTS_CARRIER "SLURM_SPANK_MURI_FACTS"

/* The mark travels in this variable, and the job finds it in the other. */
#define MURI_CARRIER "SLURM_SPANK_MURI_JOB"
#define MURI_JOB_VARIABLE "MURI_JOB"

/* The variables in which Slurm exports the options of a job: a fixed prefix, plugin, option. */
#define MURI_EXPORTED "SLURM_SPANK__SLURM_SPANK_OPTION_muri_muri"
#define MURI_EXPORTED_NO "SLURM_SPANK__SLURM_SPANK_OPTION_muri_no_muri"

/* Register --muri and --no-muri once; calling again does nothing. */
int muri_register_options(spank_t spank);

/* sbatch, salloc and srun: register the options, remove variables inherited from an outer job. */
int muri_client_init(spank_t spank);

/* sbatch, salloc: mark the job, or remove a mark inherited from an outer job. */
int muri_allocator_post_options(spank_t spank);

/* srun: mark the step; without an option of its own a step keeps its job's mark. */
int muri_local_post_options(spank_t spank);

#endif
