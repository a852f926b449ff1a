/*
 * The facts of a submission without Slurm, for the tests and for a look by hand: muri_facts N WORD… prints what
 * sbatch would send if its command line were WORD… and word number N (sbatch itself is 0) the batch script.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_line.h"
#include "facts.h"

int main(int count, char *arguments[])
{
	struct muri_words own = muri_command_line();
	char out[MURI_FACTS_SIZE];
	const char *words = own.text ? muri_word(own.text, own.size, 2) : NULL;
	int status = 64;

	if (count < 3 || !words) {
		fprintf(stderr, "usage: muri_facts N WORD…\n");
	} else if (muri_facts(words, own.size - (size_t)(words - own.text), atoi(arguments[1]), out)) {
		puts("none");
		status = 0;
	} else {
		puts(out);
		status = 0;
	}
	muri_words_free(&own);
	return status;
}
