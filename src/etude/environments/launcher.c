/* One pod: namespaces, a read-only system, a small workspace, and an agent (pid 1) that runs commands and moves files.
 *
 *   launcher UID MEMORY_MB PROCESSES DISK_MB CPU_SECONDS GROUPS [CGROUP ...] [READ_ONLY_BIND ...]
 *
 * Outer process: joins the GROUPS control groups -> child in new mount, pid, net, ipc, uts (and, without root, user)
 * namespaces -> pivot_root into a tmpfs with the host's /usr bound read-only -> drops all capabilities, seccomp -> serves
 * frames on stdin and stdout until end of file.
 *
 * Frame: u32 length, payload. Requests: op byte, body. Answers: i32 status, body. The first answer comes unasked; its status
 * is the number of control groups that could not be joined.
 *   E  f64 timeout, u32 cap, command      -> exit code; u8 truncated, u8 timed out, f64 seconds, output
 *   R  path                               -> 0 and content | -1 none | -2 outside the workspace | -100 - errno
 *   W  record*                            -> 0 | -2 outside | -100 - errno
 *   L                                     -> 0, paths of regular files, each ended by NUL
 *   D                                     -> (0, record*)*, ended by an answer without records; each is a body for W
 * Record: kind, u32 n, path, u32 n, content. Kinds: f file, x executable file (an existing file keeps its mode), a more of a
 * file, l symbolic link (content: target), d folder (its path ends with a slash).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_FRAME (64u << 20)

static int uid, memory_mb, processes, disk_mb, cpu_seconds, work_fd, child_events;
static char search_path[1024];

static void fail(const char *what) {
    fprintf(stderr, "pod: %s: %s\n", what, strerror(errno));
    _exit(3);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#include "launcher_root.c"
#include "launcher_confine.c"
#include "launcher_frames.c"
#include "launcher_files.c"

/* ------------------------------------------------------------------------------------------------- commands */

static void limit(int which, rlim_t value) {
    struct rlimit bound = {value, value}, present;
    if (!getrlimit(which, &present) && present.rlim_max != RLIM_INFINITY && present.rlim_max < value)
        bound.rlim_cur = bound.rlim_max = present.rlim_max;
    setrlimit(which, &bound);
}

static void run_command(const char *command, int out) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setsid();
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out, 1);
    dup2(out, 2);
    closefrom(3);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* else /proc/self is root's */
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (score >= 0 && write(score, "1000", 4) == 4) close(score); /* out of memory: the command dies, not the agent */
    closefrom(3);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_CPU, cpu_seconds);
    limit(RLIMIT_NOFILE, 256);
    limit(RLIMIT_AS, (rlim_t)memory_mb << 20);
    limit(RLIMIT_FSIZE, (rlim_t)disk_mb << 20);
    if (processes) limit(RLIMIT_NPROC, processes);
    if (chdir("/work")) _exit(126);
    char *arguments[] = {"sh", "-c", (char *)command, NULL};
    char *environment[] = {search_path, "HOME=/work", "LANG=C.UTF-8", "TZ=UTC", "PYTHONDONTWRITEBYTECODE=1",
                           "PYTHONHASHSEED=0", NULL};
    execve("/bin/sh", arguments, environment);
    dprintf(2, "sh: cannot run the command: %s\n", strerror(errno));
    _exit(126);
}

/* End everything in this pid namespace but the agent itself, and open /work again to the agent. */
static void kill_all(void) {
    do kill(-1, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR);
    chmod("/work", 01777);
}

/* Reap what has ended, orphans too: zombies count against the limit on processes. True when `child` was among it. */
static int reap(pid_t child, int *status) {
    int found = 0, its_status;
    for (pid_t pid; (pid = waitpid(-1, &its_status, WNOHANG)) > 0;)
        if (pid == child) found = 1, *status = its_status;
    return found;
}

/* Move up to `most` bytes of output into the answer, which keeps `cap` of them from `first` on. Bytes read, 0 at the end. */
static ssize_t take_output(int fd, size_t most, size_t first, uint32_t cap, uint8_t *truncated) {
    char block[16384];
    ssize_t n = read(fd, block, most < sizeof block ? most : sizeof block);
    if (n <= 0) return n < 0 && errno == EINTR ? 1 : 0;
    size_t room = first + cap - answer_size;
    if ((size_t)n > room) *truncated = 1;
    put(block, (size_t)n > room ? room : (size_t)n);
    return n;
}

/* Until the command itself has ended (its background processes do not count) or its time is over; true when it ended. */
static int wait_for(pid_t child, int out, double end, size_t first, uint32_t cap, uint8_t *truncated, int *status) {
    struct pollfd waits[3] = {{out, POLLIN, 0}, {child_events, POLLIN, 0}, {0, 0, 0}};
    for (double left; (left = end - now()) > 0;) {
        if (poll(waits, 3, left > 1000 ? 1000000 : 1 + (int)(left * 1000)) < 0 && errno != EINTR) _exit(4);
        if (waits[2].revents) _exit(0); /* the service has gone */
        if (waits[0].revents && !take_output(out, -1, first, cap, truncated)) waits[0].fd = -1;
        if (!waits[1].revents) continue;
        struct signalfd_siginfo ignored;
        while (read(child_events, &ignored, sizeof ignored) > 0);
        if (reap(child, status)) return 1;
    }
    return 0;
}

static void do_exec(char *body, size_t size) {
    double timeout, began = now(), seconds = 0;
    uint32_t cap;
    uint8_t flags[2] = {0, 0};
    if (size < 12) _exit(4);
    memcpy(&timeout, body, 8);
    memcpy(&cap, body + 8, 4);
    start_answer(126);
    put(flags, 2);
    put(&seconds, 8);
    size_t first = answer_size;
    int pipes[2], status = 126 << 8, left;
    if (pipe2(pipes, O_CLOEXEC)) return;
    pid_t child = fork();
    if (child == 0) run_command(body + 12, pipes[1]);
    close(pipes[1]);
    if (child > 0) flags[1] = !wait_for(child, pipes[0], began + timeout, first, cap, &flags[0], &status);
    /* what is in the pipe now, and no more: a process in the background may write for ever */
    for (ioctl(pipes[0], FIONREAD, &left); left > 0 && child > 0;) {
        ssize_t n = take_output(pipes[0], left, first, cap, &flags[0]);
        if (!n) break;
        left -= n;
    }
    close(pipes[0]);
    kill_all();
    int32_t code = flags[1] ? 124 : WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    seconds = now() - began;
    memcpy(answer + 4, &code, 4);
    memcpy(answer + 8, flags, 2);
    memcpy(answer + 10, &seconds, 8);
}

static void serve(void) {
    for (;;) {
        uint32_t size;
        read_all(&size, 4);
        if (size < 1 || size > MAX_FRAME) _exit(4);
        char *frame = malloc(size + 1);
        if (!frame) _exit(4);
        read_all(frame, size);
        frame[size] = 0;
        switch (frame[0]) {
            case 'E': do_exec(frame + 1, size - 1); break;
            case 'R': do_read(frame + 1); break;
            case 'W': do_write(frame + 1, size - 1); break;
            case 'L': do_walk(0); break;
            case 'D': do_walk(1); break;
            default: _exit(4);
        }
        free(frame);
        send_answer();
    }
}

/* ----------------------------------------------------------------------------------------------- the beginning */

/* Before anything is forked, so that nothing of the pod escapes its limits. */
static int join_groups(int num_groups, char **groups) {
    int missed = 0;
    for (int i = 0; i < num_groups; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/cgroup.procs", groups[i]);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        missed += fd < 0 || write(fd, "0", 1) != 1;
        if (fd >= 0) close(fd);
    }
    return missed;
}

/* RLIMIT_NPROC counts the processes of a user namespace since Linux 5.14, before that all those of the user. */
static int counts_by_namespace(void) {
    struct utsname name;
    int major = 0, minor = 0;
    return !uname(&name) && sscanf(name.release, "%d.%d", &major, &minor) == 2 && (major > 5 || (major == 5 && minor >= 14));
}

static void map_user(int real_uid, int real_gid) {
    char map[64];
    uid = 1000;
    if (!counts_by_namespace()) processes = 0;
    write_text("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "%d %d 1", uid, real_uid);
    write_text("/proc/self/uid_map", map);
    snprintf(map, sizeof map, "%d %d 1", uid, real_gid);
    write_text("/proc/self/gid_map", map);
}

/* The outer process waits for the pod. On SIGTERM (the service's, or its death's) it ends the pod and reaps it: an orphan would
 * stay a zombie for as long as the machine's own init takes, which in a container may be for ever. */
static int keep(pid_t child, const sigset_t *events) {
    close(0), close(1);
    for (int status, signal;;) {
        if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
        if (!sigwait(events, &signal) && signal == SIGTERM) kill(child, SIGKILL);
    }
}

int main(int argc, char **argv) {
    if (argc < 7) return 2;
    uid = atoi(argv[1]), memory_mb = atoi(argv[2]), processes = atoi(argv[3]), disk_mb = atoi(argv[4]);
    cpu_seconds = atoi(argv[5]);
    int num_groups = atoi(argv[6]), first_bind = 7 + num_groups;
    if (num_groups < 0 || first_bind > argc) return 2;
    snprintf(search_path, sizeof search_path, "PATH=%s", getenv("PATH") ? getenv("PATH") : "/usr/local/bin:/usr/bin:/bin");
    umask(022);
    /* what the service ignores is its own affair; raw, since libc's signal() refuses the two real-time signals it keeps */
    unsigned long by_default[4] = {0};
    for (int number = 1; number <= 64; number++) syscall(SYS_rt_sigaction, number, by_default, NULL, 8);
    sigset_t events;
    sigemptyset(&events);
    sigaddset(&events, SIGCHLD);
    sigaddset(&events, SIGTERM);
    sigprocmask(SIG_BLOCK, &events, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    int missed = join_groups(num_groups, argv + 7);
    int as_root = geteuid() == 0, real_uid = getuid(), real_gid = getgid();
    int flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS;
    if (as_root && unshare(flags)) as_root = 0; /* root of a container without CAP_SYS_ADMIN */
    else if (as_root) flags = 0;
    if (flags && unshare(flags | CLONE_NEWUSER)) fail("unshare");
    if (flags) map_user(real_uid, real_gid);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* a new user namespace clears it */
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child > 0) return keep(child, &events);
    sigprocmask(SIG_UNBLOCK, &events, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sethostname("pod", 3);
    build_root(argc - first_bind, argv + first_bind);
    if (as_root && chown("/work", uid, uid)) fail("chown");
    drop_privileges(as_root);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* setuid clears it */
    signal(SIGPIPE, SIG_IGN);
    sigdelset(&events, SIGTERM);
    sigprocmask(SIG_BLOCK, &events, NULL);
    child_events = signalfd(-1, &events, SFD_CLOEXEC | SFD_NONBLOCK);
    work_fd = open("/work", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (work_fd < 0 || child_events < 0) fail("work");
    start_answer(missed);
    send_answer();
    serve();
}
