/* What a command may do: no capabilities, no new privileges, and a seccomp filter. Part of launcher.c. */

#define DENY(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
#define LOAD_NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define LOAD_ARGUMENT(index) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[index])) /* low word */
#define REFUSE BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
#define DENY_IF_BITS(number, index, bits)                                                                        \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 4), LOAD_ARGUMENT(index),                                     \
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1), REFUSE, LOAD_NUMBER
#define DENY_UNLESS(number, index, value)                                                                        \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 4), LOAD_ARGUMENT(index),                                     \
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 1, 0), REFUSE, LOAD_NUMBER
#define NS_FLAGS (CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#if defined(__x86_64__)
#define THIS_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define THIS_ARCH AUDIT_ARCH_AARCH64
#else
#error "pods need x86-64 or arm64"
#endif

static void confine_syscalls(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        LOAD_NUMBER,
#if defined(__x86_64__)
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), /* the x32 calls */
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
#endif
        DENY(SYS_mount), DENY(SYS_umount2), DENY(SYS_pivot_root), DENY(SYS_chroot), DENY(SYS_ptrace),
        DENY(SYS_process_vm_readv), DENY(SYS_process_vm_writev), DENY(SYS_process_madvise), DENY(SYS_pidfd_getfd),
        DENY(SYS_kcmp), DENY(SYS_keyctl), DENY(SYS_add_key), DENY(SYS_request_key), DENY(SYS_bpf),
        DENY(SYS_perf_event_open), DENY(SYS_kexec_load), DENY(SYS_kexec_file_load), DENY(SYS_init_module),
        DENY(SYS_finit_module), DENY(SYS_delete_module), DENY(SYS_unshare), DENY(SYS_setns), DENY(SYS_userfaultfd),
        DENY(SYS_open_by_handle_at), DENY(SYS_name_to_handle_at), DENY(SYS_reboot), DENY(SYS_swapon),
        DENY(SYS_swapoff), DENY(SYS_acct), DENY(SYS_settimeofday), DENY(SYS_clock_settime), DENY(SYS_adjtimex),
        DENY(SYS_clock_adjtime), DENY(SYS_sethostname), DENY(SYS_setdomainname), DENY(SYS_io_uring_setup),
        DENY(SYS_io_uring_enter), DENY(SYS_io_uring_register), DENY(SYS_fsopen), DENY(SYS_fsconfig),
        DENY(SYS_fsmount), DENY(SYS_fspick), DENY(SYS_open_tree), DENY(SYS_move_mount), DENY(SYS_mount_setattr),
        DENY(SYS_syslog), DENY(SYS_personality), DENY(SYS_quotactl), DENY(SYS_fanotify_init),
        DENY_IF_BITS(SYS_mknodat, 2, 0x2000), /* set in S_IFCHR and S_IFBLK, not in S_IFIFO or S_IFSOCK */
#if defined(__x86_64__)
        DENY_IF_BITS(SYS_mknod, 1, 0x2000), DENY(SYS_iopl), DENY(SYS_ioperm), DENY(SYS_modify_ldt),
#endif
        DENY_IF_BITS(SYS_prlimit64, 0, 0xffffffff), /* of another process: it could starve the agent */
        DENY_IF_BITS(SYS_clone, 0, NS_FLAGS),
        DENY_UNLESS(SYS_socket, 0, 1 /* AF_UNIX */), DENY_UNLESS(SYS_socketpair, 0, 1),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS), /* libc falls back to clone */
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) fail("seccomp");
}

static void drop_privileges(int was_root) {
    for (int cap = 0; cap <= 63; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (was_root && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))) fail("setuid");
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &header, none)) fail("capset");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* commands run under the same uid: keep them out of the agent's memory */
    confine_syscalls();
}

