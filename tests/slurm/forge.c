/* Sends slurmctld what sbatch would never send: forge HOW KEY=VALUE..., the latter on standard input, each ended by NUL.
 * HOW is batch, allocation, batch-het, allocation-het, or the id of a job to change. Prints the job's id. */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(25, 11, 0)
#define JOB_ID job_id
#else
#define JOB_ID step_id.job_id
#endif
#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(26, 5, 0)
#define NO_CALLBACK NULL
#else
#define NO_CALLBACK NULL, -1
#endif

static char text[4 << 20], *environment[] = { "PATH=/usr/bin:/bin" }, *spank[9];

static void set(job_desc_msg_t *job, const char *key, char *value)
{
	struct { const char *key; char **field; } fields[] = {
		{ "admin_comment", &job->admin_comment }, { "comment", &job->comment }, { "name", &job->name },
		{ "licenses", &job->licenses }, { "gres", &job->tres_per_node }, { "script", &job->script },
	};

	for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
		if (!strcmp(key, fields[i].key))
			*fields[i].field = value;
	if (!strcmp(key, "spank"))
		spank[job->spank_job_env_size++] = value;
	if (!strcmp(key, "hold"))
		job->priority = 0;
}

int main(int argc, char **argv)
{
	job_desc_msg_t job;
	submit_response_msg_t *batch = NULL;
	resource_allocation_response_msg_t *allocation = NULL;
	const char *how = argv[argc - 1];

	slurm_init(NULL);
	slurm_init_job_desc_msg(&job);
	if (isdigit(*how)) {
		job.job_id_str = argv[1];
	} else {
		job.user_id = getuid(), job.group_id = getgid(), job.min_nodes = 1;
		job.name = "forged", job.work_dir = "/tmp", job.std_out = "/dev/null";
		job.script = "#!/bin/sh\nexec sleep 600\n";
		job.environment = environment, job.env_size = 1, job.spank_job_env = spank;
	}
	size_t length = fread(text, 1, sizeof text - 1, stdin);
	for (char *key = text, *value; key < text + length && (value = strchr(key, '=')); key = value + strlen(value) + 1) {
		*value++ = 0;
		set(&job, key, value);
	}
	list_t *het = slurm_list_create(NULL);
	slurm_list_append(het, &job);
	if (!strncmp(how, "allocation", 10))
		job.script = NULL;
	int code = isdigit(*how) ? slurm_update_job(&job)
		: !strcmp(how, "batch-het") ? slurm_submit_batch_het_job(het, &batch)
		: !strcmp(how, "allocation-het") ? !slurm_allocate_het_job_blocking(het, 1, NO_CALLBACK)
		: job.script ? slurm_submit_batch_job(&job, &batch) : slurm_allocate_resources(&job, &allocation);
	if (code)
		return fprintf(stderr, "%s\n", slurm_strerror(errno)), 1;
	printf("%u\n", batch ? batch->JOB_ID : allocation ? allocation->JOB_ID : 0);
	return 0;
}
