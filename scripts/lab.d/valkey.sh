# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # The files share their variables, which the comments name.
# Sourced by lab: finds or builds a Valkey with RDMA, because the distributions build theirs without.

valkey_programs=(valkey-server valkey-cli valkey-benchmark)

# Sets valkey to a directory with the programs.
get_valkey() {
  if [ -n "${VALKEYRDMA_VALKEY:-}" ]; then
    valkey=$(realpath "$VALKEYRDMA_VALKEY")
    [ -x "$valkey/valkey-server" ] || die "VALKEYRDMA_VALKEY: there is no valkey-server in $valkey"
    return
  fi
  local source=${VALKEYRDMA_VALKEY_SOURCE:-} name=''
  if [ -n "$source" ]; then
    source=$(realpath "$source")
    if [ -d "$source" ]; then
      # Files that a build inside the directory makes do not count.
      name=$(find "$source" -name .git -prune -o -type f -name '*.[chS]' -printf '%p %s %T@\n' | sort | sha256sum)
    elif [ -f "$source" ]; then
      name=$(sha256sum <"$source")
    else
      die "VALKEYRDMA_VALKEY_SOURCE: there is no $source"
    fi
    name=source-${name:0:16}
  fi
  cached_valkey "$name" && return
  packages "to build Valkey with RDMA" gcc libc6-dev make libibverbs-dev librdmacm-dev xz-utils
  lock
  # Another lab may have built it while this one waited for the lock.
  cached_valkey "$name" && return
  build_valkey "$source" "$name"
}

cached_valkey() {
  local newest
  if [ -n "$1" ]; then
    newest=$cache/valkey/$1
  else
    newest=$(printf '%s\n' "$cache"/valkey/[0-9]* | sort -V | tail -n 1)
  fi
  [ -x "$newest/valkey-server" ] || return 1
  valkey=$newest
}

# build_valkey SOURCE NAME: from a directory or a tarball or, when SOURCE is empty, from the source package in Debian sid.
build_valkey() {
  local source=$1 name=$2 work version program
  work=$(temporary)
  if [ -z "$source" ]; then
    packages "to unpack Debian's source of Valkey" dpkg-dev
    say "fetching the source of Valkey from Debian sid ..."
    SECONDS=0
    debian deb-src sid ||
      failed "fetching the lists of Debian sid" ||
      die "please fetch a release of Valkey (9.1 or later) and set VALKEYRDMA_VALKEY_SOURCE to its tarball or directory"
    step fetch_valkey_source "$work" || failed "fetching the source of Valkey" || exit 125
    say "fetched in $SECONDS s"
  elif [ -d "$source" ]; then
    mkdir "$work/source"
    step cp -a "$source/." "$work/source" || failed "copying $source" || exit 125
    step make -C "$work/source" distclean || true
  else
    mkdir "$work/source"
    step tar -C "$work/source" --strip-components=1 -xf "$source" || failed "unpacking $source" || exit 125
  fi
  version=$(sed -n 's/^#define VALKEY_VERSION "\(.*\)"$/\1/p' "$work/source/src/version.h")
  say "building Valkey $version with RDMA (some 3 minutes on two processors; output in $step_log) ..."
  SECONDS=0
  # The flags of the caller are for his own programs.
  step ${with_parent[@]+"${with_parent[@]}"} env -u MAKEFLAGS -u CFLAGS -u LDFLAGS -u CPPFLAGS -u OPTIMIZATION \
    make -C "$work/source/src" -j"$(nproc)" BUILD_RDMA=yes MALLOC=libc "${valkey_programs[@]}" ||
    failed "building Valkey" || exit 125
  mkdir "$work/programs" "$cache/valkey" 2>/dev/null
  for program in "${valkey_programs[@]}"; do cp "$work/source/src/$program" "$work/programs/" || exit 125; done
  valkey=$cache/valkey/${name:-$version}
  mv -T "$work/programs" "$valkey" || exit 125
  rm -rf "$work"
  say "built Valkey $version in $SECONDS s"
}
fetch_valkey_source() {
  cd "$1" && apt-get "${apt_options[@]}" source valkey && mv valkey-*/ source
}
