/*
 * The contents of a grant and the files that say where a task is, without Slurm.
 *
 *   try_grant comment TEXT | gpus TEXT | part COUNT MURI_STEP_GPUS TASK | numbers GPUS FIRST COUNT
 *   try_grant words TEXT FIRST COUNT | cgroup JOB CGROUP MOUNTINFO | devices DIRECTORY
 *   try_grant find JOB PID                 (of which kind the cgroup of a process of the job is)
 *   try_grant within DIRECTORY             (mounts over it, and counts what is there: within this process, and outside)
 *   try_grant program DEVICE… -- DEVICE…   (c4:40: the answers of a program that refuses the first ones, run here)
 *   try_grant fuzz SEED ROUNDS             (every parser, with texts made of pieces of such texts)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/bpf.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/sysmacros.h>

#include "muri.h"

enum { USAGE = 64, MOST_PROGRAM = MURI_MOST_CLOSED * 5 + 6, TEXT_SIZE = 2048 };

static uint32_t number(const char *text)
{
	uint32_t value;

	if (!muri_number(text, &value))
		exit(USAGE);
	return value;
}

static void broken(void)
{
	fprintf(stderr, "the program is broken\n");
	abort();
}

static int show_comment(const char *text)
{
	static const char *const names[] = {"none", "granted", "unclear"};
	uint32_t pilot = 0;
	enum muri_granted granted = muri_granted_pilot(text, &pilot);

	printf("%s %lu %s\n", names[granted], granted == MURI_GRANTED ? (unsigned long)pilot : 0ul,
	       muri_waits_for_license(text) ? "license" : "hold");
	return 0;
}

static int show_gpus(const char *text)
{
	struct muri_gpus gpus;

	if (!muri_read_gpus(text, &gpus)) {
		puts("refused");
		return 0;
	}
	for (size_t i = 0; i < gpus.count; i++)
		printf("%lu%c", (unsigned long)gpus.number[i], i + 1 < gpus.count ? ' ' : '\n');
	return 0;
}

static int show_part(size_t count, const char *text, uint32_t task)
{
	struct muri_part part;
	uint32_t each = 0;

	if (!muri_per_task(text, &each))
		each = 0;
	if (muri_part_of_task(count, each, task, &part))
		printf("%zu %zu\n", part.first, part.count);
	else
		puts("refused");
	return 0;
}

static int show_list(bool listed, const char *out)
{
	puts(listed ? out : "refused");
	return 0;
}

static int show_cgroup(uint32_t job, const char *lines, const char *mounts)
{
	static const char *const kinds[] = {"none", "other", "v1", "v2"};
	struct muri_cgroup_path path;
	char directory[MURI_CGROUP_SIZE];

	if (!muri_cgroup_path(lines, job, &path)) {
		puts("none");
		return 0;
	}
	printf("%s %.*s %s\n", kinds[path.kind], (int)path.job_size, path.path, path.path + path.job_size);
	while (muri_cgroup_mounted(&mounts, &path, directory, sizeof(directory)))
		puts(directory);
	return 0;
}

static void count_there(void *directory)
{
	struct muri_devices devices;

	printf("%d\n", muri_devices_below(directory, &devices) ? (int)devices.count : -1);
	fflush(stdout);
	muri_devices_free(&devices);
}

static int within(char *directory)
{
	int outside = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);

	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", directory, "tmpfs", 0, NULL))
		return 1;
	count_there(directory);
	if (!muri_act_in(outside, count_there, directory) || muri_act_in(-1, count_there, directory))
		broken();
	return 0;
}

static int find(uint32_t job, const char *pid)
{
	static const char *const answers[] = {"unclear", "none", "found"};
	struct muri_cgroup cgroup;

	puts(answers[1 + muri_cgroup_find((pid_t)number(pid), job, &cgroup)]);
	return 0;
}

static int show_devices(const char *directory)
{
	struct muri_devices devices;

	if (!muri_devices_below(directory, &devices)) {
		puts("refused");
		return 0;
	}
	for (size_t i = 0; i < devices.count; i++)
		printf("%c%u:%u\n", devices.each[i].type, major(devices.each[i].number), minor(devices.each[i].number));
	muri_devices_free(&devices);
	return 0;
}

static struct muri_device device(const char *text)
{
	unsigned int of_driver, own;
	char type;

	if (sscanf(text, "%c%u:%u", &type, &of_driver, &own) != 3)
		exit(USAGE);
	return (struct muri_device){.type = type, .number = makedev(of_driver, own)};
}

/* Run the few instructions that a device program has, as the kernel does. */
static int run(const struct bpf_insn *program, size_t count, struct muri_device asked)
{
	uint32_t context[] = {
		(asked.type == 'c' ? BPF_DEVCG_DEV_CHAR : BPF_DEVCG_DEV_BLOCK) | (BPF_DEVCG_ACC_READ << 16),
		major(asked.number),
		minor(asked.number),
	};
	uint64_t registers[11] = {0};

	for (size_t at = 0; at < count; at++) {
		struct bpf_insn step = program[at];

		switch (step.code) {
		case BPF_LDX | BPF_W | BPF_MEM:
			if (step.src_reg != BPF_REG_1 || step.off < 0 || step.off > 8)
				broken();
			registers[step.dst_reg] = context[step.off / 4];
			break;
		case BPF_ALU | BPF_AND | BPF_K:
			registers[step.dst_reg] = (uint32_t)registers[step.dst_reg] & (uint32_t)step.imm;
			break;
		case BPF_JMP | BPF_JNE | BPF_K:
			if (registers[step.dst_reg] != (uint64_t)(int64_t)step.imm)
				at += (size_t)step.off;
			break;
		case BPF_ALU64 | BPF_MOV | BPF_K:
			registers[step.dst_reg] = (uint64_t)(int64_t)step.imm;
			break;
		case BPF_JMP | BPF_EXIT:
			return (int)registers[0];
		default:
			broken();
		}
	}
	broken();
	return -1;
}

static int show_program(int count, char *words[])
{
	static struct bpf_insn program[MOST_PROGRAM];
	struct muri_device closed[MURI_MOST_CLOSED];
	size_t size, used = 0;
	int i = 0;

	for (; i < count && strcmp(words[i], "--"); i++)
		closed[used++] = device(words[i]);
	size = muri_device_program(closed, used, program);
	if (size != used * 5 + 6)
		broken();
	for (i++; i < count; i++)
		printf("%s %d\n", words[i], run(program, size, device(words[i])));
	return 0;
}

static uint64_t state;

static uint64_t dice(uint64_t sides)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % sides;
}

/* A text of its own size on the heap, so that the sanitizer sees each byte behind its end. */
static char *made_text(void)
{
	static const char *const pieces[] = {
		"muri-grant:", "muri-gate:", "licence", "license", " ", "\n", "\t", "1", "12", "4294967295", "4294967296", ",",
		"0", "99999", "per-task:", "0::/", "3:devices:/", "1:name=systemd:/", "a,devices,b", ":", "/job_7", "/job_", "7",
		"/step_batch", "/step_0", "/task_0", "/user", "/s3S9M8M911KB00", "25 1 0:22 / ", "/sys/fs/cgroup", " rw ",
		"shared:1 ", "- ", "cgroup2 ", "cgroup ", "rw,devices", "\\040", "\\0", "\\", "/", "-", "\x01", "\xff", "MIG-a",
	};
	char text[TEXT_SIZE], *own;
	size_t used = 0, count = dice(24);

	while (count-- && used + 32 < sizeof(text)) {
		const char *piece = pieces[dice(sizeof(pieces) / sizeof(pieces[0]))];

		memcpy(text + used, piece, strlen(piece));
		used += strlen(piece);
		if (used && dice(8) == 0)
			text[dice(used)] = (char)(1 + dice(255));
	}
	own = malloc(used + 1);
	if (!own)
		exit(1);
	memcpy(own, text, used);
	own[used] = '\0';
	return own;
}

static void try_all(const char *one, const char *other)
{
	char out[64], directory[128];
	struct muri_cgroup_path path;
	struct muri_part part = {.first = dice(4), .count = dice(4)};
	struct muri_gpus gpus;
	uint32_t value = 0;

	if (muri_granted_pilot(one, &value) == MURI_GRANTED && (value == 0 || !strstr(one, "muri-grant:")))
		broken();
	muri_waits_for_license(one);
	if (muri_read_gpus(one, &gpus) && muri_list_numbers(&gpus, (struct muri_part){0, gpus.count}, out, sizeof(out)) &&
	    (gpus.count == 0 || gpus.count > strlen(one) || strlen(out) > strlen(one)))
		broken();
	if (muri_per_task(one, &value) && value == 0)
		broken();
	if (muri_list_words(one, part, out, sizeof(out)) && strlen(out) > strlen(one))
		broken();
	if (muri_cgroup_path(one, 7, &path)) {
		const char *mounts = other;

		if (path.job_size == 0 || path.job_size >= strlen(path.path) || path.path[path.job_size] != '/')
			broken();
		while (muri_cgroup_mounted(&mounts, &path, directory, sizeof(directory)))
			if (strlen(directory) >= sizeof(directory))
				broken();
	}
}

static int fuzz(uint32_t seed, uint32_t rounds)
{
	state = 0x9e3779b97f4a7c15u ^ seed;
	while (rounds--) {
		char *one = made_text(), *other = made_text();

		try_all(one, other);
		free(one);
		free(other);
	}
	return 0;
}

int main(int count, char *words[])
{
	const char *verb = count > 2 ? words[1] : "";
	char out[64];

	if (strcmp(verb, "comment") == 0)
		return show_comment(words[2]);
	if (strcmp(verb, "gpus") == 0)
		return show_gpus(words[2]);
	if (strcmp(verb, "devices") == 0)
		return show_devices(words[2]);
	if (strcmp(verb, "within") == 0)
		return within(words[2]);
	if (strcmp(verb, "program") == 0)
		return show_program(count - 2, words + 2);
	if (count < 4)
		return USAGE;
	if (strcmp(verb, "find") == 0)
		return find(number(words[2]), words[3]);
	if (strcmp(verb, "fuzz") == 0)
		return fuzz(number(words[2]), number(words[3]));
	if (count != 5)
		return USAGE;
	if (strcmp(verb, "cgroup") == 0)
		return show_cgroup(number(words[2]), words[3], words[4]);
	if (strcmp(verb, "part") == 0)
		return show_part(number(words[2]), words[3], number(words[4]));
	if (strcmp(verb, "numbers") == 0) {
		struct muri_gpus gpus;
		bool global = muri_read_gpus(words[2], &gpus);

		return show_list(muri_list_numbers(global ? &gpus : NULL,
						   (struct muri_part){number(words[3]), number(words[4])}, out, sizeof(out)),
				 out);
	}
	if (strcmp(verb, "words") == 0)
		return show_list(muri_list_words(words[2], (struct muri_part){number(words[3]), number(words[4])}, out,
						 sizeof(out)),
				 out);
	return USAGE;
}
