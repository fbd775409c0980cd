// Included first in every source of a wheel. The linker takes the newest version of a function. Of
// these, glibc 2.28 or the libstdc++ of GCC 8 lacks it; the older ones are in all later releases.
#ifdef __aarch64__
#define KVSWAP_GLIBC(version) "GLIBC_2.17"  // its first release there
#else
#define KVSWAP_GLIBC(version) "GLIBC_" #version
#endif
#define KVSWAP_LINK_TO(name, version) __asm__(".symver " #name "," #name "@" version)

KVSWAP_LINK_TO(dlopen, KVSWAP_GLIBC(2.2.5));
KVSWAP_LINK_TO(dlsym, KVSWAP_GLIBC(2.2.5));
KVSWAP_LINK_TO(exp2, KVSWAP_GLIBC(2.2.5));
KVSWAP_LINK_TO(log2, KVSWAP_GLIBC(2.2.5));
KVSWAP_LINK_TO(pthread_mutex_trylock, KVSWAP_GLIBC(2.2.5));
KVSWAP_LINK_TO(pthread_setname_np, KVSWAP_GLIBC(2.12));
// std::condition_variable::wait
KVSWAP_LINK_TO(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");
