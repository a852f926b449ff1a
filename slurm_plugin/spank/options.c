#include "muri.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char ALPHABET[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+/-:=,";
static const char CONTRADICTION[] = "--muri and --no-muri contradict each other; keep one";

const char *muri_options_want(struct muri_options *options, enum muri_layer layer, const char *text)
{
	static const char letters[] = {[MURI_SCRIPT] = 's', [MURI_ENVIRONMENT] = 'e', [MURI_COMMAND_LINE] = 'c'};
	char *texts = options->layer[layer].texts;
	size_t used = strlen(texts), length = text ? strlen(text) : 0;

	if (options->layer[layer].refused)
		return CONTRADICTION;
	if (text && strspn(text, ALPHABET) != length)
		return "only letters, digits and . _ + / - : = , are allowed; write key=value,key=value without spaces";
	if (used + length > MURI_TEXT_MAX)
		return "the text is longer than 1000 characters";
	snprintf(texts + used, MURI_LAYER_SIZE - used, "%s%c:%s", used ? ";" : "", letters[layer], text ? text : "");
	options->layer[layer].wanted = true;
	return NULL;
}

const char *muri_options_refuse(struct muri_options *options, enum muri_layer layer)
{
	if (options->layer[layer].wanted)
		return CONTRADICTION;
	options->layer[layer].refused = true;
	return NULL;
}

bool muri_options_result(const struct muri_options *options, char out[MURI_TEXTS_SIZE])
{
	bool wanted = false;

	out[0] = '\0';
	for (int i = 0; i < MURI_LAYERS; i++) {
		size_t used = strlen(out);

		if (options->layer[i].refused) {
			wanted = false;
			out[0] = '\0';
		}
		if (options->layer[i].wanted) {
			snprintf(out + used, MURI_TEXTS_SIZE - used, "%s%s", wanted ? ";" : "", options->layer[i].texts);
			wanted = true;
		}
	}
	return wanted;
}

bool muri_options_given(const struct muri_options *options)
{
	for (int i = 0; i < MURI_LAYERS; i++)
		if (options->layer[i].wanted || options->layer[i].refused)
			return true;
	return false;
}

void muri_options_mark(const char *texts, char out[MURI_TEXTS_SIZE])
{
	size_t used = 0;

	while (*texts) {
		const char *text = texts + strlen("c:");
		size_t length = strcspn(text, ";");

		if (length)
			used += (size_t)snprintf(out + used, MURI_TEXTS_SIZE - used, "%s%.*s", used ? "," : "", (int)length,
						 text);
		texts = text + length + (text[length] == ';');
	}
	if (!used)
		snprintf(out, MURI_TEXTS_SIZE, "on");
}

bool muri_is_mark(const char *text)
{
	size_t length = strlen(text);

	return length > 0 && length < MURI_TEXTS_SIZE && strspn(text, ALPHABET) == length;
}

bool muri_says_no(const char *text)
{
	static const char *const words[] = {"0", "no", "off", "false"};

	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
		if (strcasecmp(text, words[i]) == 0)
			return true;
	return false;
}
