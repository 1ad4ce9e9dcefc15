# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # The files share their variables, which the comments name.
# Sourced by lab: messages, long steps that can be interrupted, the cache and its lock, packages of the distribution.

say() { echo "lab: $*" >&2; }
# 125 as in timeout(1) and docker(1): the lab itself failed, CMD did not run.
die() {
  say "$*"
  exit 125
}

cache=${XDG_CACHE_HOME:-${HOME:?lab: neither XDG_CACHE_HOME nor HOME is set}/.cache}/valkeyrdma

# step COMMAND...: a long command, its output in $step_log. It runs in a process group of its own, so that an interrupted lab
# can end it with all its children at once, and without the descriptor of the lock, so that it cannot hold that for longer.
step_pid=''
step() {
  local status=0
  set -m
  "$@" </dev/null >>"$step_log" 2>&1 9>&- &
  step_pid=$!
  set +m
  wait "$step_pid" 2>/dev/null || status=$?
  step_pid=''
  return "$status"
}
# failed WHAT: a step failed; shows the end of its output. Returns false.
failed() {
  say "$* failed; the end of the output:"
  tail -n 20 "$step_log" >&2
  return 1
}
step_takedown() {
  [ -z "$step_pid" ] || kill -TERM -- "-$step_pid" 2>/dev/null || true
}

# Everything that writes to the cache does so under the lock: into $cache/tmp.*, and then by one rename to where it belongs.
# So whatever tmp.* there is when the lock is taken was left by an interrupted run.
locked=''
lock() {
  [ -z "$locked" ] || return 0
  mkdir -p "$cache" || die "cannot make the cache directory $cache"
  exec 9>"$cache/lock" || die "cannot write to the cache directory $cache"
  if ! flock -n 9; then
    say "waiting for another lab that is filling $cache"
    flock 9
  fi
  locked=yes
  rm -rf "$cache"/tmp.*
  step_log=$cache/log
  : >"$step_log"
}
unlock() {
  [ -n "$locked" ] || return 0
  exec 9>&-
  locked=''
}
temporary() { mktemp -d "$cache/tmp.XXXXXX"; }

# What a package is needed for is what tells whether it is missing, so that this also serves where there is no dpkg.
has_package() {
  case $1 in
    gcc | make | cpio) command -v "$1" ;;
    iproute2) command -v ip && command -v rdma ;;
    kmod) command -v modprobe && command -v depmod ;;
    xz-utils) command -v xz ;;
    dpkg-dev) command -v dpkg-source ;;
    debian-archive-keyring) debian_keyring ;;
    libc6-dev) [ -e /usr/include/stdio.h ] ;;
    libibverbs-dev) [ -e /usr/include/infiniband/verbs.h ] ;;
    librdmacm-dev) [ -e /usr/include/rdma/rdma_cma.h ] ;;
    ibverbs-providers) compgen -G '/usr/lib*/libibverbs/librxe*' || compgen -G '/usr/lib/*/libibverbs/librxe*' ;;
    busybox-static) static_busybox ;;
    qemu-system-x86) command -v qemu-system-x86_64 ;;
    *) dpkg -s "$1" ;;
  esac >/dev/null 2>&1
}
static_busybox() {
  local file
  for file in /bin/busybox /usr/bin/busybox /bin/busybox.static /usr/bin/busybox-static; do
    # A dynamic program names its loader near the beginning.
    if [ -x "$file" ] && ! head -c 4096 "$file" | grep -qa 'ld-linux\|ld-musl'; then
      echo "$file"
      return
    fi
  done
  return 1
}
debian_keyring() {
  local file
  for file in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
    if [ -e "$file" ]; then
      echo "$file"
      return
    fi
  done
  return 1
}

# packages WHY PACKAGE...: installs what is missing of the packages.
packages() {
  local why=$1 package missing=()
  shift
  for package; do has_package "$package" || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null; then
    say "needed $why, here under their Debian names: ${missing[*]}"
    say "this system has no apt-get: please install them by its own means and come back"
    exit 2
  fi
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}")
  if [ "$(id -u)" != 0 ]; then
    say "needed $why: ${missing[*]}. To install them, type:"
    echo "sudo ${install[*]:2}" >&2
    exit 2
  fi
  say "installing $why: ${missing[*]}"
  lock
  SECONDS=0
  # The lists may be missing, as in a fresh container, or out of date; only then it is worth fetching them.
  if ! step "${install[@]}"; then
    step apt-get update || failed "apt-get update" || exit 125
    step "${install[@]}" || failed "${install[*]}" || exit 125
  fi
  for package in "${missing[@]}"; do
    has_package "$package" || die "$package is installed, but what it is needed for is still not there"
  done
  say "installed in $SECONDS s"
}

# debian TYPE SUITE: makes a private apt directory for a suite of Debian, so that the system's own settings and lists stay as they
# are, and sets apt_options to use it. The address of the mirror is the one this machine is set up with. False where it has none.
debian() {
  local type=$1 suite=$2 uri keyring dir
  command -v apt-get >/dev/null || return 1
  # shellcheck disable=SC2016 # The names are apt's, not the shell's.
  uri=$({
    apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages'
    # Without lists nothing is known of a repository but its address and suite.
    apt-get indextargets --no-release-info --format 'Debian Debian $(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
      grep -E ' (bookworm|trixie|forky|sid|oldstable|stable|testing|unstable)$'
  } 2>/dev/null | awk '$1 == "Debian" && $2 == "Debian" && $3 !~ /security/ { print $3; exit }')
  [ -n "$uri" ] || return 1
  packages "to fetch from Debian" debian-archive-keyring
  keyring=$(debian_keyring)
  dir=$cache/apt/$suite
  mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/parts"
  echo "$type [signed-by=$keyring] $uri $suite main" >"$dir/sources.list"
  apt_options=(-o Dir::Etc::sourcelist="$dir/sources.list" -o Dir::Etc::sourceparts="$dir/parts"
    -o Dir::State::Lists="$dir/lists" -o Dir::Cache="$dir/cache" -o APT::Sandbox::User="$(id -un)"
    -o Acquire::Languages=none)
  step apt-get "${apt_options[@]}" -o APT::Update::Error-Mode=any update
}
