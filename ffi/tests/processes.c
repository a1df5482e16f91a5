/* How processes begin, fork and end. The program calls itself with the name of a scenario. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* ---- scenarios, each in a process of its own ---- */

static int without_a_driver(void) {
    void *out = NULL;
    if (glake_start() == GLAKE_OK) return 0; /* This machine has one. */
    FAILS(glake_start(), GLAKE_UNAVAILABLE, "no CUDA driver: ");
    FAILS(glake_alloc(0, 1, NULL, &out), GLAKE_UNAVAILABLE, "without a GPU, glake demo, glake replay and glake bench run");
    CHECK(gmlake_malloc(1, 0, NULL) == NULL && strstr(gmlake_last_error(), "no CUDA driver") != NULL);
    CHECK(!glake_started() && glake_device_name() == NULL);
    gmlake_free(NULL, 0, 0, NULL);
    gmlake_reset();
    FAILS(glake_free(&out), GLAKE_INVALID, "never handed out");
    /* A start that failed is tried again. */
    setenv("GLAKE_DEVICE", "sim", 1);
    OK(glake_alloc(0, 1, NULL, &out));
    return 0;
}

static int with_a_broken_file(void) {
    void *out = NULL;
    FAILS(glake_alloc(0, 1, NULL, &out), GLAKE_UNAVAILABLE, ":2: unknown key pool.extend");
    FAILS(glake_configure(NULL, "/no/such.toml", NULL), GLAKE_INVALID, "/no/such.toml: No such file");
    unsetenv("GLAKE_CONFIG");
    OK(glake_configure("serverless", NULL, "pool.limit = \"64MiB\""));
    FAILS(glake_alloc(0, 65 * MIB, NULL, &out), GLAKE_OUT_OF_MEMORY, "64.00 MiB allowed; ");
    OK(glake_alloc(0, 60 * MIB, NULL, &out));
    return 0;
}

static int with_a_variable_that_is_wrong(void) {
    FAILS(glake_start(), GLAKE_UNAVAILABLE, "reuseLimit = \"many\": allowed is");
    return 0;
}

/* Ranks of one program share the machine's links already. */
static int beside_other_ranks(void) {
    setenv("GLAKE_MULTI_PATH", "1", 1);
    OK(glake_start());
    char *stats = glake_copy_stats_json();
    CHECK(stats != NULL && strstr(stats, "\"multi_path\":false") != NULL);
    glake_string_free(stats);
    FAILS(glake_multi_path(1), GLAKE_INVALID, "transfer.multi_path is true, and 2 processes of this program run");
    OK(glake_multi_path(0));
    return 0;
}

static int asked_for_by_the_environment(void) {
    OK(glake_start());
    OK(glake_free(block_of(0, 20 * MIB, NULL)));
    char *stats = glake_copy_stats_json();
    CHECK(stats != NULL && strstr(stats, "\"multi_path\":true") != NULL);
    glake_string_free(stats);
    return 0;
}

/* One of each that a program gives up, from destructors above all. */
static struct {
    char *block, *other, *text;
    void *stream, *shared;
    glake_checkpoint *checkpoint;
    uint64_t copy, use;
    _Alignas(4096) char pinned[4096];
} given;

static void take_one_of_each(void) {
    uint8_t handle[4096];
    size_t length = 0;
    uint64_t offset = 0;
    given.block = block_of(0, 20 * MIB, NULL);
    given.other = block_of(0, MIB, NULL);
    given.text = glake_snapshot_json();
    OK(glake_stream_create(0, &given.stream));
    OK(glake_share(block_of(0, MIB, NULL), handle, sizeof handle, &length, &offset));
    OK(glake_open_shared(handle, length, 0, &given.shared));
    OK(glake_pool_begin(0, 0, 9, NULL, NULL, NULL));
    OK(glake_pool_checkpoint(0, 0, 9, &given.checkpoint));
    OK(glake_copy_async(given.block, given.block + MIB, MIB, given.stream, 0, &given.copy));
    OK(glake_host_register(given.pinned, sizeof given.pinned));
    OK(glake_region_define("r", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    OK(glake_region_push("r"));
    OK(glake_region_fix(given.block, true));
    OK(glake_use_begin(NULL, 0, GLAKE_WHEN_CLOSED_REFUSE, 0, &given.use));
}

/* Where nothing is served any more all of it is given up without a word. */
static void give_all_of_it_up(void) {
    char before[300];
    snprintf(before, sizeof before, "%s", glake_last_error());
    int32_t owners = -1;
    uint64_t released = 1;
    const struct {
        const char *name;
        int32_t status;
    } ends[] = {
        {"free", glake_free(given.block)},
        {"trim", glake_trim(-1, 0, &released)},
        {"trim without an answer", glake_trim(0, 0, NULL)},
        {"pool_end", glake_pool_end(0, 0, 9)},
        {"pool_release", glake_pool_release(0, 0, 9)},
        {"pool_use_count", glake_pool_use_count(0, 0, 9, &owners)},
        {"pool_trim", glake_pool_trim(0, 0, 9)},
        {"pool_unfix", glake_pool_fix(0, 9, false)},
        {"stream_destroy", glake_stream_destroy(0, given.stream)},
        {"copy_drop", glake_copy_drop(given.copy)},
        {"host_unregister", glake_host_unregister(given.pinned)},
        {"close_shared", glake_close_shared(given.shared)},
        {"region_pop", glake_region_pop()},
        {"plain_pop", glake_plain_pop()},
        {"region_fix", glake_region_fix(given.block, false)},
        {"use_end", glake_use_end(given.use)},
        {"on_out_of_memory", glake_on_out_of_memory(NULL, NULL)},
        {"on_mapping", glake_on_mapping(NULL, NULL)},
        {"leave", glake_leave()},
        {"hooks_set", glake_hooks_set(NULL, NULL, NULL, -1)},
    };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends[i].status != GLAKE_OK) {
            fprintf(stderr, "glake_%s answered %d: %s\n", ends[i].name, ends[i].status, glake_last_error());
            exit(1);
        }
    CHECK(owners == 0 && released == 0);
    glake_checkpoint_drop(given.checkpoint);
    glake_string_free(given.text);
    gmlake_free(given.other, MIB, 0, NULL);
    gmlake_record_stream(given.other, NULL);
    gmlake_reset();
    CHECK(strcmp(glake_last_error(), before) == 0);
}

/* A child may look at nothing of its parent's: it gives up into the void, and everything else fails. */
static int in_a_forked_child(void) {
    take_one_of_each();
    char *block = given.block;
    block[0] = 'p';
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        void *out = NULL;
        give_all_of_it_up();
        FAILS(glake_alloc(0, 1, NULL, &out), GLAKE_UNAVAILABLE, "was forked from one that uses the GPU");
        CHECK(gmlake_malloc(1, 0, NULL) == NULL && !glake_started());
        FAILS(glake_stats(0, &(glake_device_stats){0}), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_configure(NULL, NULL, NULL), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_pool_create(0, 0, 1), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_pool_begin(0, 0, 1, NULL, NULL, NULL), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_stream_create(0, &out), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_host_register(given.pinned, sizeof given.pinned), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_region_push("r"), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_region_fix(block, true), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_copy_wait(given.copy), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_copy_async(block, block, 1, NULL, 0, NULL), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_multi_path(1), GLAKE_UNAVAILABLE, "spawn");
        FAILS(glake_join(NULL, NULL), GLAKE_UNAVAILABLE, "spawn");
        CHECK(glake_copy_try(block, block, 1, NULL, 0) == 1);
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    int32_t owners = 0;
    OK(glake_pool_use_count(0, 0, 9, &owners));
    CHECK(block[0] == 'p' && stats_of(0).all.allocation.current == 3 && owners == 1);
    OK(glake_use_end(given.use));
    OK(glake_region_pop());
    OK(glake_pool_end(0, 0, 9));
    OK(glake_pool_release(0, 0, 9));
    OK(glake_free(block));
    return 0;
}

static void at_the_end_of_what_was_taken(void) {
    give_all_of_it_up();
    puts("given up");
    fflush(stdout);
}

static int ended_with_one_of_each(void) {
    atexit(at_the_end_of_what_was_taken);
    take_one_of_each();
    return 0;
}

/* How many descriptors of memory are open: those of simulated extents, and those that are exported of them. */
static int memory_files(void) {
    int count = 0;
    char path[64], name[64] = "";
    for (int fd = 0; fd < 1024; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        count += readlink(path, name, sizeof name) > 0 && strncmp(name, "/memfd:", 7) == 0;
    }
    return count;
}

/* A child that is forked has nothing by which memory that is shared would outlive its block. */
static int forked_after_sharing(void) {
    uint8_t handle[4096];
    size_t length = 0;
    uint64_t offset = 0;
    void *block = block_of(0, 100 * MIB, NULL);
    const int before = memory_files();
    CHECK(before > 0);
    OK(glake_share(block, handle, sizeof handle, &length, &offset));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(memory_files() == before);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}

static int forked_before_the_start(void) {
    CHECK(!glake_started());
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        OK(glake_free(block_of(0, 20 * MIB, NULL)));
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(glake_free(block_of(0, 20 * MIB, NULL)));
    return 0;
}

static void *held;
static uint64_t unwaited;

/* Registered before the library's own handler, so it runs after it. */
static void at_the_very_end(void) {
    void *out = NULL;
    OK(glake_free(held));
    FAILS(glake_free(held), GLAKE_INVALID, "freed before");
    FAILS(glake_alloc(0, 1, NULL, &out), GLAKE_UNAVAILABLE, "the process is exiting");
    CHECK(gmlake_malloc(1, 0, NULL) == NULL);
    CHECK(stats_of(0).all.allocation.current == 100);
    gmlake_free(NULL, 0, 0, NULL);
    gmlake_record_stream(held, NULL);
    FAILS(glake_copy_wait(unwaited), GLAKE_UNAVAILABLE, "no copy is made any more");
    CHECK(glake_copy_try(&out, &out, 8, NULL, 0) == 1);
    puts("ended");
    fflush(stdout);
}

static void *churn(void *unused) {
    (void)unused;
    for (;;) {
        void *block = NULL;
        if (glake_alloc(1, 3 * MIB, (void *)2, &block) == GLAKE_OK) glake_free(block);
    }
    return NULL;
}

static int ended_with_blocks_alive(void) {
    atexit(at_the_very_end);
    held = block_of(0, 20 * MIB, NULL);
    for (int i = 0; i < 100; i++) {
        OK(glake_free(block_of(0, 30 * MIB, (void *)2)));
        CHECK(block_of(0, 5000 * (size_t)(i + 1), NULL) != NULL);
    }
    OK(glake_multi_path(1));
    OK(glake_copy_async(held, held, 20 * MIB, NULL, 0, &unwaited));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
    usleep(2000);
    return 0;
}

/* The copy that started first serves, whichever it is; the other says both names. */
static int with_a_second_copy(void) {
    OK(glake_start());
    void *second = dlopen(getenv("GLAKE_SECOND_COPY"), RTLD_NOW | RTLD_LOCAL);
    CHECK(second != NULL);
    int32_t (*start)(void) = (int32_t(*)(void))dlsym(second, "glake_start");
    const char *(*last_error)(void) = (const char *(*)(void))dlsym(second, "glake_last_error");
    void *(*alloc)(size_t, int, void *) = (void *(*)(size_t, int, void *))dlsym(second, "gmlake_malloc");
    CHECK(start != NULL && start != glake_start && last_error != NULL && alloc != NULL);
    CHECK(start() == GLAKE_UNAVAILABLE);
    CHECK(strstr(last_error(), "two copies of GLake") != NULL);
    CHECK(strstr(last_error(), getenv("GLAKE_SECOND_COPY")) != NULL);
    CHECK(strstr(last_error(), "libgmlake.so has started already") != NULL);
    CHECK(alloc(1, 0, NULL) == NULL);
    CHECK(strcmp(glake_last_error(), "") == 0);
    OK(glake_free(block_of(0, 1, NULL)));
    dlclose(second);
    return 0;
}

static int loaded_and_never_used(void) {
    CHECK(!glake_started());
    return 0;
}

/* ---- the program that calls them ---- */

struct scenario {
    const char *name;
    int (*body)(void);
    const char *variable, *value; /* set for it; a null value unsets */
    const char *says;             /* on standard output */
};

static const struct scenario SCENARIOS[] = {
    {"without-a-driver", without_a_driver, "GLAKE_DEVICE", NULL, ""},
    {"broken-file", with_a_broken_file, "GLAKE_CONFIG", "/tmp/glake-test-broken.toml", ""},
    {"wrong-variable", with_a_variable_that_is_wrong, "reuseLimit", "many", ""},
    {"other-ranks", beside_other_ranks, "LOCAL_WORLD_SIZE", "2", ""},
    {"multi-path", asked_for_by_the_environment, "GLAKE_MULTI_PATH", "1", ""},
    {"forked-child", in_a_forked_child, NULL, NULL, ""},
    {"forked-after-sharing", forked_after_sharing, NULL, NULL, ""},
    {"forked-before", forked_before_the_start, NULL, NULL, ""},
    {"ended", ended_with_blocks_alive, NULL, NULL, "ended\n"},
    {"ended-holding", ended_with_one_of_each, NULL, NULL, "given up\n"},
    {"second-copy", with_a_second_copy, NULL, NULL, ""},
    {"never-used", loaded_and_never_used, NULL, NULL, ""},
};

enum { COUNT = sizeof SCENARIOS / sizeof *SCENARIOS };

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* The library's own file, copied elsewhere. */
static void copy_library(const char *to) {
    Dl_info info;
    CHECK(dladdr((void *)glake_start, &info) != 0);
    FILE *from = fopen(info.dli_fname, "rb"), *into = fopen(to, "wb");
    CHECK(from != NULL && into != NULL);
    static char buffer[1 << 16];
    for (size_t count; (count = fread(buffer, 1, sizeof buffer, from)) > 0;) CHECK(fwrite(buffer, 1, count, into) == count);
    CHECK(fclose(into) == 0);
    fclose(from);
}

static void run(const char *program, const struct scenario *scenario) {
    int output[2];
    CHECK(pipe(output) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (scenario->variable != NULL && scenario->value != NULL) setenv(scenario->variable, scenario->value, 1);
        if (scenario->variable != NULL && scenario->value == NULL) unsetenv(scenario->variable);
        alarm(60);
        dup2(output[1], STDOUT_FILENO);
        execl("/proc/self/exe", program, scenario->name, (char *)NULL);
        _exit(127);
    }
    close(output[1]);
    char said[100] = "";
    size_t length = 0;
    for (ssize_t count; (count = read(output[0], said + length, sizeof said - 1 - length)) > 0;) length += (size_t)count;
    close(output[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || strcmp(said, scenario->says) != 0) {
        fprintf(stderr, "%s: status %#x, said \"%s\"\n", scenario->name, (unsigned)status, said);
        exit(1);
    }
}

int main(int count, char **arguments) {
    for (int i = 0; count == 2 && i < COUNT; i++)
        if (strcmp(arguments[1], SCENARIOS[i].name) == 0) return SCENARIOS[i].body();
    char copy[100], broken[100];
    snprintf(copy, sizeof copy, "/tmp/glake-test-%d-copy.so", (int)getpid());
    snprintf(broken, sizeof broken, "/tmp/glake-test-broken.toml");
    copy_library(copy);
    write_file(broken, "[pool]\nextend = 1\n");
    setenv("GLAKE_SECOND_COPY", copy, 1);
    for (int i = 0; i < COUNT; i++) run(arguments[0], &SCENARIOS[i]);
    unlink(copy);
    unlink(broken);
    return 0;
}
