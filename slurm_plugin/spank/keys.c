#include "keys.h"

#include <string.h>

#include "values.h"

enum {
	NAME_MAX_COMPARED = 32,
	EDITS_MAX = 2,		/* further off than this is not a typing error */
};

const struct muri_key muri_keys[] = {
	{"model", "model=NAME", "name under which the training profile is kept", false, muri_read_model},
	{"batch-size", "batch-size=N", "samples per iteration on one GPU", false, muri_read_batch_size},
	{"duration", "duration=TIME", "expected run time alone: minutes, HH:MM:SS, 90m, 2h", false, muri_read_duration},
	{"checkpoint", "checkpoint", "the job writes checkpoints and may be stopped and resumed", true,
	 muri_read_checkpoint},
	{"alone", "alone", "profile the job but never group it with others", true, muri_read_alone},
	{"accumulate", "accumulate=N", "the script can split each batch into up to N parts (muri.accumulate)", false,
	 muri_read_accumulate},
	{0},
};

const struct muri_key *muri_find_key(const char *name)
{
	for (const struct muri_key *key = muri_keys; key->name; key++)
		if (strcmp(key->name, name) == 0)
			return key;
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
	for (const struct muri_key *key = muri_keys; key->name; key++) {
		int distance = edit_distance(name, key->name);

		if (strncmp(name, key->name, length) == 0)
			distance = 0;	/* a beginning of the key, such as "batch" */
		if (distance < best) {
			best = distance;
			nearest = key->name;
		}
	}
	return nearest;
}
