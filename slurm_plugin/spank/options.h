/* Collects the texts of --muri and --no-muri from every place a user can write them. Their meaning is up to muri.lua. */
#ifndef MURI_OPTIONS_H
#define MURI_OPTIONS_H

#include <stdbool.h>

/* Where an option was written. A later layer overrides an earlier one, as for sbatch's own options. */
enum muri_layer { MURI_SCRIPT, MURI_ENVIRONMENT, MURI_COMMAND_LINE, MURI_LAYERS };

enum {
	MURI_TEXT_MAX = 1000,	/* characters in the texts of a layer */
	MURI_LAYER_SIZE = MURI_TEXT_MAX + sizeof(";c:"),
	MURI_TEXTS_SIZE = MURI_LAYERS * (MURI_LAYER_SIZE + 1),
};

struct muri_options {
	struct {
		char texts[MURI_LAYER_SIZE];	/* "c:model=a;c:alone": a letter for the layer before each text */
		bool wanted;	/* --muri */
		bool refused;	/* --no-muri */
	} layer[MURI_LAYERS];
};

void muri_options_clear(struct muri_options *options);

/* Note a --muri[=text] in a layer. Returns NULL, or the reason for which the user must change it. */
const char *muri_options_want(struct muri_options *options, enum muri_layer layer, const char *text);

/* Note a --no-muri in a layer. Returns NULL, or the reason for which the user must change it. */
const char *muri_options_refuse(struct muri_options *options, enum muri_layer layer);

/* True if the user wants Muri for the job; `out` then holds the texts of all layers, such as "s:model=a;c:". */
bool muri_options_result(const struct muri_options *options, char out[MURI_TEXTS_SIZE]);

/* True if --muri or --no-muri stands in any layer. */
bool muri_options_given(const struct muri_options *options);

/* Write texts as one, as a job finds them in MURI_JOB: "s:model=a;c:alone" as "model=a,alone", "c:" as "on". */
void muri_options_mark(const char *texts, char out[MURI_TEXTS_SIZE]);

/* True if the text has the alphabet and the length of a mark. */
bool muri_is_mark(const char *text);

/* True for 0, no, off and false, in any case. */
bool muri_says_no(const char *text);

#endif
