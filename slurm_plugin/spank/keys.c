#include "keys.h"

#include <stddef.h>
#include <string.h>

enum {
	NAME_MAX_COMPARED = 32,
	EDITS_MAX = 2,		/* a name with more edits than this is no typing error */
};

const struct muri_key muri_keys[MURI_KEY_COUNT] = {
/* generated from slurm_plugin/submit_option.yaml: keys */
	{
		.name = "model",
		.form = "model=NAME",
		.example = "model=resnet18",
		.help = "name under which the training profile is kept",
		.type = MURI_NAME,
		.max = 64,
	},
	{
		.name = "batch-size",
		.form = "batch-size=N",
		.example = "batch-size=64",
		.help = "samples per iteration on one GPU",
		.type = MURI_COUNT,
		.min = 1,
		.max = 1000000000,
	},
	{
		.name = "duration",
		.form = "duration=TIME",
		.example = "duration=90m",
		.help = "expected run time alone: minutes, HH:MM:SS, 90m, 2h",
		.type = MURI_TIME,
		.min = 1,
		.max = 315360000,
	},
	{
		.name = "checkpoint",
		.form = "checkpoint",
		.example = "checkpoint",
		.help = "the job writes checkpoints and may be stopped and resumed",
		.type = MURI_FLAG,
	},
	{
		.name = "alone",
		.form = "alone",
		.example = "alone",
		.help = "profile the job but never group it with others",
		.type = MURI_FLAG,
	},
	{
		.name = "accumulate",
		.form = "accumulate=N",
		.example = "accumulate=8",
		.help = "the script can split each batch into up to N parts (muri.accumulate)",
		.type = MURI_COUNT,
		.min = 1,
		.max = 1024,
	},
	{
		.name = "min-speed",
		.form = "min-speed=X",
		.example = "min-speed=0.8",
		.help = "least speed beside others, as a share of its speed alone",
		.type = MURI_SHARE,
	},
	{
		.name = "opportunistic",
		.form = "opportunistic",
		.example = "opportunistic",
		.help = "the job only asks for what others leave over",
		.type = MURI_FLAG,
	},
/* end of the generated part */
};

const struct muri_key *muri_find_key(const char *name)
{
	for (int i = 0; i < MURI_KEY_COUNT; i++)
		if (strcmp(muri_keys[i].name, name) == 0)
			return &muri_keys[i];
	return NULL;
}

static int smaller(int a, int b)
{
	return a < b ? a : b;
}

/* Edits that turn a into b, counting a swap of two neighbours as one ("modle" -> "model"). */
static int edit_distance(const char *a, const char *b)
{
	int rows = (int)strlen(a), columns = (int)strlen(b);
	int cost[NAME_MAX_COMPARED + 1][NAME_MAX_COMPARED + 1];

	for (int i = 0; i <= rows; i++)
		cost[i][0] = i;
	for (int j = 0; j <= columns; j++)
		cost[0][j] = j;
	for (int i = 1; i <= rows; i++) {
		for (int j = 1; j <= columns; j++) {
			int change = cost[i - 1][j - 1] + (a[i - 1] != b[j - 1]);

			cost[i][j] = smaller(change, smaller(cost[i - 1][j], cost[i][j - 1]) + 1);
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				cost[i][j] = smaller(cost[i][j], cost[i - 2][j - 2] + 1);
		}
	}
	return cost[rows][columns];
}

const char *muri_nearest_key(const char *name)
{
	const char *nearest = NULL;
	size_t length = strlen(name);
	int best = EDITS_MAX + 1;

	if (length < 2 || length > NAME_MAX_COMPARED)
		return NULL;
	for (int i = 0; i < MURI_KEY_COUNT; i++) {
		const char *key = muri_keys[i].name;
		int distance = edit_distance(name, key);

		if (strncmp(name, key, length) == 0)
			distance = 0;	/* a beginning of the key, such as "batch" */
		if (distance < best) {
			best = distance;
			nearest = key;
		}
	}
	return nearest;
}
