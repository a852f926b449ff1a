/* The keys of --muri: the parser, the help and the error messages follow this table. */
#ifndef MURI_KEYS_H
#define MURI_KEYS_H

enum muri_type {
	MURI_NAME,	/* a letter or digit, then letters, digits and . _ + / - */
	MURI_COUNT,	/* a whole number */
	MURI_TIME,	/* a Slurm time or a number with a unit; kept in seconds */
	MURI_SHARE,	/* at least 0 and below 1; kept in thousandths */
	MURI_FLAG,	/* yes or no; a bare key means "yes" */
};

struct muri_key {
	const char *name;
	const char *form;	/* as shown to a user, for example "model=NAME" */
	const char *example;	/* as a user may type it, for example "model=resnet18" */
	const char *help;
	enum muri_type type;
	long long min;		/* MURI_COUNT, MURI_TIME */
	long long max;		/* MURI_COUNT, MURI_TIME in seconds, MURI_NAME in characters */
};

/* generated from slurm_plugin/submit_option.yaml: limits */
enum {
	MURI_KEY_COUNT = 8,
	MURI_NAME_MAX = 64,	/* characters in a name */
	MURI_CANONICAL_SIZE = 181,	/* longest canonical text, with its NUL */
};

#define MURI_KEYS_HELP \
	"model=NAME (name under which the training profile is kept), " \
	"batch-size=N (samples per iteration on one GPU), " \
	"duration=TIME (expected run time alone: minutes, HH:MM:SS, 90m, 2h), " \
	"checkpoint (the job writes checkpoints and may be stopped and resumed), " \
	"alone (profile the job but never group it with others), " \
	"accumulate=N (the script can split each batch into up to N parts (muri.accumulate)), " \
	"min-speed=X (least speed beside others, as a share of its speed alone), " \
	"opportunistic (the job only asks for what others leave over)"
/* end of the generated part */

/* In the order of the canonical text. */
extern const struct muri_key muri_keys[MURI_KEY_COUNT];

/* The key of this name, or NULL. */
const struct muri_key *muri_find_key(const char *name);

/* The valid key that a mistyped name most resembles, or NULL if none is close. */
const char *muri_nearest_key(const char *name);

#endif
