# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # The files share their variables, which the comments name.
# Sourced by lab: the kernel of the virtual machine and the initramfs that starts it.

# Sets kernel (the release), vmlinuz and modules (the directory .../lib/modules/RELEASE).
get_kernel() {
  local wanted=${VALKEYRDMA_KERNEL:-6.1} tree
  case $wanted in
    host)
      host_kernel || die "VALKEYRDMA_KERNEL=host: no readable /boot/vmlinuz-* has rdma_rxe, 9p and overlay among its modules"
      return
      ;;
    */*) use_kernel "$(realpath "$wanted")" || die "VALKEYRDMA_KERNEL: $wanted has no boot/vmlinuz-* with its lib/modules" ;;
    6.1 | 6.12)
      tree=$cache/kernel/$wanted
      use_kernel "$tree" && return
      lock
      use_kernel "$tree" && return
      if ! fetch_kernel "$wanted"; then
        [ -z "${VALKEYRDMA_KERNEL:-}" ] || die "the kernel cannot be fetched; VALKEYRDMA_KERNEL takes a directory with one, too"
        host_kernel ||
          die "no kernel: please unpack one with rdma_rxe and set VALKEYRDMA_KERNEL to the directory with its boot/ and lib/"
        say "no kernel could be fetched: taking this machine's own"
        return
      fi
      use_kernel "$tree" || die "the fetched kernel in $tree is not usable"
      ;;
    *) die "VALKEYRDMA_KERNEL=$wanted: known are 6.1, 6.12, host, and a directory" ;;
  esac
}

# use_kernel TREE [RELEASE]: of several releases in TREE the newest that has rxe.
use_kernel() {
  local tree=$1 release
  for release in $(find "$tree/boot" -maxdepth 1 -name 'vmlinuz-*' -printf '%f\n' 2>/dev/null | sed 's/^vmlinuz-//' | sort -rV); do
    modules=$(realpath -m "$tree/lib/modules/$release")
    [ -d "$modules" ] || modules=$(realpath -m "$tree/usr/lib/modules/$release")
    vmlinuz=$(realpath "$tree/boot/vmlinuz-$release")
    if [ -r "$vmlinuz" ] && [ -n "$(find "$modules" -name 'rdma_rxe.ko*' 2>/dev/null)" ] &&
      { [ -e "$modules/modules.dep" ] || depmod -b "$tree" "$release" 2>/dev/null; }; then
      kernel=$release
      return
    fi
  done
  return 1
}
host_kernel() { use_kernel /; }

# fetch_kernel VERSION: Debian's generic kernel, unpacked into the cache and never installed. (Debian's "cloud" kernels have
# neither rxe nor 9p.)
fetch_kernel() {
  local version=$1 suite suites work
  case $version in
    6.1) suites=bookworm ;;
    6.12) suites="trixie bookworm-backports" ;;
  esac
  work=$(temporary)
  say "fetching Debian's kernel $version (some 100 MB) ..."
  SECONDS=0
  for suite in $suites; do
    debian deb "$suite" || failed "fetching the lists of Debian $suite" || continue
    step unpack_kernel "$work" || failed "fetching the kernel from $suite" || continue
    mkdir -p "$cache/kernel"
    rm -rf "$cache/kernel/$version"
    mv -T "$work/tree" "$cache/kernel/$version" || return 1
    rm -rf "$work"
    say "fetched in $SECONDS s"
    return 0
  done
  return 1
}
unpack_kernel() {
  local package
  # The package without a version depends on the one that has the kernel.
  package=$(LC_ALL=C apt-cache "${apt_options[@]}" depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p')
  [ -n "$package" ] || return 1
  rm -rf "$1/tree"
  cd "$1" && apt-get "${apt_options[@]}" download "$package" && dpkg-deb -x ./*.deb tree && rm ./*.deb || return 1
  # A kernel made for a merged /usr has its modules there.
  [ -e tree/lib ] || ln -s usr/lib tree/lib
  rm -rf tree/usr/share
  depmod -b "$PWD/tree" "$(basename tree/lib/modules/*)"
}

# Sets image and initrd: what QEMU boots. They depend on the kernel, on busybox and on what is written here and in init.
get_boot() {
  local key work
  busybox=$(static_busybox)
  key=$({
    cat "$here/lab.d/init" "$here/lab.d/kernel.sh"
    stat -c '%n %s %Y' "$busybox" "$vmlinuz" "$modules/modules.dep"
  } | sha256sum)
  boot=$cache/boot/$kernel-${key:0:16}
  image=$vmlinuz initrd=$boot/initrd
  if [ ! -d "$boot" ]; then
    lock
    work=$(temporary)
    mkdir "$work/boot"
    step make_initrd "$work" || failed "making the initramfs for Linux $kernel" || exit 125
    step make_vmlinux "$work/boot/vmlinux" || rm -f "$work/boot/vmlinux"
    mkdir -p "$cache/boot"
    rm -rf "$cache/boot/$kernel"-*
    mv -T "$work/boot" "$boot" || exit 125
    rm -rf "$work"
  fi
  [ ! -e "$boot/vmlinux" ] || image=$boot/vmlinux
}
# make_vmlinux FILE: the kernel, unpacked. Without KVM the machine itself takes three seconds and more for that. QEMU can boot
# it where the kernel is made for PVH. False if that is not so, or the kernel packed in a way not known here.
make_vmlinux() {
  local offset
  grep -qx 'CONFIG_PVH=y' "${vmlinuz/vmlinuz/config}" || return 1
  offset=$(LC_ALL=C grep -abo -m1 $'\xfd7zXZ' "$vmlinuz" | head -n 1 | cut -d: -f1)
  [ -n "$offset" ] || return 1
  tail -c "+$((offset + 1))" "$vmlinuz" | xz -dc --single-stream >"$1"
  # What comes after the kernel is an error to xz or not, depending on its version: the header tells.
  [ "$(head -c 4 "$1")" = $'\x7fELF' ]
}
make_initrd() {
  local root=$1/root number=100 wanted file
  mkdir -p "$root"/{bin,sbin,modules,proc,sys,dev,tmp} &&
    cp "$busybox" "$root/bin/busybox" && install -m 755 "$here/lab.d/init" "$root/init" || return 1
  # The order counts: crc32_generic first, because rxe of 6.1 asks the crypto layer for "crc32" by name and otherwise only says
  # "failed to add dummy0". Some are built into some kernels, and later ones have no crc32_generic any more: no failure here.
  for wanted in crc32_generic crc32c_generic crc32c_intel crc32_pclmul virtio_pci 9pnet_virtio 9p overlay \
    ib_uverbs rdma_ucm rdma_rxe dummy; do
    modprobe -d "${modules%/lib/modules/*}/" -S "$kernel" --show-depends "$wanted" 2>/dev/null |
      sed -n 's/^insmod \([^ ]*\).*/\1/p' || true
  done | awk '!seen[$0]++' >"$1/list"
  while read -r file; do
    number=$((number + 1))
    wanted=$root/modules/$number-$(basename "${file%.ko*}").ko
    case $file in
      *.xz) xz -dc "$file" ;;
      *.zst) zstd -qdc "$file" ;;
      *.gz) gzip -dc "$file" ;;
      *) cat "$file" ;;
    esac >"$wanted" || return 1
  done <"$1/list"
  ls "$root/modules"
  compgen -G "$root/modules/*-rdma_rxe.ko" || return 1
  (cd "$root" && find . | cpio -o -H newc | gzip -1) >"$1/boot/initrd"
}
