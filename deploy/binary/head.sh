#!/bin/sh
[ "$(stat -Lc %s "$0" 2>/dev/null || echo @BYTES@)" -eq @BYTES@ ] || {
    echo "dataloader: $0 is damaged: its archive is not complete or was changed; copy it again" >&2
    exit 1
}
# Standalone binary of dataloader @VERSION@: this script, followed by an archive (tar, gzip) with Python, the program and
# PostgreSQL. The first start unpacks the archive into the cache, under its hash; every start runs the program there. The
# shell runs the lines above before it reads further, so that they report a truncated copy. See docs/standalone.md.

_dl_fail() {
    echo "dataloader: $*" >&2
    exit 1
}

_dl_look() { # the program may be started without a path
    { LC_ALL=C stat -c '%A %h %u %g' "$1" || LC_ALL=C ls -ldn "$1" || LC_ALL=C /bin/ls -ldn "$1"; } 2>/dev/null
}

_dl_owner() {
    set -f
    set -- $(_dl_look "$1")
    echo "${3-}"
}

# Succeed if only this user and root can change the contents of a folder; otherwise _dl_wrong has the reason. A folder
# above the cache (second argument) may be sticky, or writable by its group if that is root's or this user's own.
_dl_is_safe() {
    _dl_path=$1 _dl_above=${2-} _dl_wrong="cannot be read"
    _dl_seen=$(_dl_look "$1") || return 1
    set -f
    set -- $_dl_seen # mode, links, owner, group, …
    set +f
    _dl_wrong="is a link"
    case $1 in l*) return 1 ;; esac
    _dl_wrong="belongs to another user"
    [ "$3" = 0 ] || [ -O "$_dl_path" ] || return 1
    _dl_wrong="other users can write to"
    case $_dl_above$1 in
    above?????????[tT]*) return 0 ;;
    esac
    case $1 in
    ????????w*) return 1 ;;
    ?????w*)
        [ -n "$_dl_above" ] || return 1
        [ "$4" = 0 ] || { [ "$4" = "$(id -g)" ] && [ "$(id -gn)" = "$(id -un)" ]; }
        ;;
    esac
}

_dl_check_cache() {
    _dl_is_safe "$_dl_cache" || _dl_fail "does not use $_dl_cache, which $_dl_wrong; $_dl_hint"
    _dl_up=$_dl_cache
    while [ "${_dl_up%/*}" ]; do
        _dl_up=${_dl_up%/*}
        _dl_is_safe "$_dl_up" above || _dl_fail "does not use $_dl_cache: it is in $_dl_up, which $_dl_wrong; $_dl_hint"
    done
}

_dl_unpack() {
    export LC_ALL=C # for the causes
    umask 022
    # One of several concurrent starts unpacks. Without flock all of them do, and the first folder stays.
    command -v flock >/dev/null && flock -w 300 9 2>/dev/null
    [ ! -x "$_dl_folder/dataloader" ] || return 0
    sum=$(tail -n +@LINES@ "$0" | sha256sum)
    case $sum in
    "$_dl_hash"*) ;;
    *) _dl_fail "$0 is damaged: its archive is not complete or was changed; copy it again" ;;
    esac
    made=$(mktemp -d "$_dl_cache/.$_dl_hash.XXXXXX" 2>&1) || _dl_fail "cannot write to $_dl_cache: ${made##*: }; $_dl_hint"
    trap 'rm -rf "$made"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    chmod 755 "$made"
    if ! said=$({ tail -n +@LINES@ "$0" | gzip -dc | tar -xf - -C "$made" && : >"$made/used"; } 2>&1); then
        case $said in
        *"No space left"* | *"quota exceeded"*) said="no space left" ;;
        esac
        _dl_fail "cannot unpack its @SIZE@ MB into $_dl_cache: $(echo "$said" | head -n 1); $_dl_hint"
    fi
    said=$("$made/dataloader" --version 2>&1) || case $?$said in
    126*"ermission denied"*) _dl_fail "cannot run in $_dl_cache, which does not allow programs (noexec); $_dl_hint" ;;
    *) _dl_fail "cannot run here; it needs Linux on @ARCH@ with glibc @GLIBC@ or later: $(echo "$said" | tail -n 1)" ;;
    esac
    sync -f "$made" 2>/dev/null # a folder gets its name when it is complete, and on the disk
    mv -T "$made" "$_dl_folder" 2>/dev/null || [ -x "$_dl_folder/dataloader" ] ||
        _dl_fail "cannot use $_dl_folder: it is damaged; remove it"
}

_dl_main() {
    _dl_hash=@HASH@
    _dl_hint="set DATALOADER_CACHE to another folder"
    if [ -n "${DATALOADER_CACHE-}" ]; then
        _dl_cache=$DATALOADER_CACHE
    elif [ -n "${XDG_CACHE_HOME-}" ]; then
        _dl_cache=$XDG_CACHE_HOME/dataloader
    elif [ -n "${HOME-}" ]; then
        _dl_cache=$HOME/.cache/dataloader
    else
        _dl_fail "cannot unpack itself: HOME is not set; set DATALOADER_CACHE to a folder"
    fi
    case $_dl_cache in
    /*) ;;
    *) _dl_fail "cannot unpack itself into $_dl_cache, which is not an absolute path; $_dl_hint" ;;
    esac
    while [ "$_dl_cache" != "${_dl_cache%/}" ]; do # a link with / behind it is the folder
        _dl_cache=${_dl_cache%/}
    done
    if [ ! -x "$_dl_cache/$_dl_hash/dataloader" ]; then
        for _dl_tool in chmod gzip head mkdir mktemp mv rm sha256sum tail tar touch; do
            command -v "$_dl_tool" >/dev/null || _dl_fail "needs $_dl_tool on the path to unpack itself"
        done
        _dl_said=$({ umask 022 && LC_ALL=C mkdir -p "$_dl_cache"; } 2>&1) ||
            _dl_fail "cannot unpack itself into $_dl_cache: ${_dl_said##*: }; $_dl_hint"
    fi
    # A user who can write to the cache, or to a folder above it, can replace our folder at any time.
    # Root may have replaced the cache by a link, as systemd does.
    [ ! -L "$_dl_cache" ] || [ "$(_dl_owner "$_dl_cache")" = 0 ] ||
        _dl_fail "does not use $_dl_cache, which is a link; $_dl_hint"
    _dl_cache=$(cd "$_dl_cache" 2>/dev/null && pwd -P) || _dl_fail "cannot use its cache, which is not a folder; $_dl_hint"
    _dl_check_cache
    _dl_folder=$_dl_cache/$_dl_hash
    if [ ! -x "$_dl_folder/dataloader" ]; then
        _dl_said=$({ umask 022 && LC_ALL=C touch "$_dl_cache/.lock"; } 2>&1) ||
            _dl_fail "cannot unpack itself into $_dl_cache: ${_dl_said##*: }; $_dl_hint"
        (_dl_unpack) 9>>"$_dl_cache/.lock" || exit 1
    fi
    # Another user may have created this folder before, with other programs.
    _dl_is_safe "$_dl_folder" || _dl_fail "does not run the contents of $_dl_folder, which $_dl_wrong; $_dl_hint"
    exec "$_dl_folder/dataloader" "$@"
}

_dl_main "$@"
exit
