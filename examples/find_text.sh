#!/usr/bin/env bash
# Puts a plain text of some megabytes into FOLDER/text.txt and says on standard output what it is:
#   find_text.sh FOLDER
# The King James Bible of Debian's package bible-kjv where it is or can be had, else large text files that any machine has.
set -u
folder=$1
enough=4000000 # bytes
mkdir -p "$folder"
text=$folder/text.txt

if ! command -v bible >/dev/null 2>&1; then
    . "$(dirname "$0")/../cmake/needs.sh"
    want 'have bible' bible-kjv "a text to learn from: the King James Bible"
    install_missing >&2
fi
if command -v bible >/dev/null 2>&1; then
    bible -f 'Gen1:1-Rev22:21' >"$text.new" 2>/dev/null </dev/null # one verse a line, with its reference
    if [ "$(wc -c <"$text.new")" -ge $enough ]; then
        mv "$text.new" "$text"
        echo "the King James Bible (Debian's bible-kjv, public domain), $(wc -c <"$text") bytes"
        exit 0
    fi
fi

# Prose first: manuals and licences; then what comes with every compiler and interpreter.
candidates() {
    find -L /usr/share/perl /usr/share/doc /usr/share/common-licenses /usr/share/info -type f \
        \( -name '*.pod' -o -name '*.txt' -o -path '*common-licenses/*' -o -name 'copyright' \) -size +20k 2>/dev/null | sort
    find -L /usr/lib/python3* /usr/local/lib/python3* -maxdepth 1 -type f -name '*.py' -size +20k 2>/dev/null | sort
    find -L /usr/include /Library/Developer -type f -name '*.h' -size +20k 2>/dev/null | sort | head -n 2000
}
: >"$text.new"
files=0
while IFS= read -r file; do
    cat "$file" >>"$text.new" 2>/dev/null && files=$((files + 1))
    if [ "$(wc -c <"$text.new")" -ge $enough ]; then break; fi
done < <(candidates)
if [ "$(wc -c <"$text.new")" -lt 200000 ]; then
    rm -f "$text.new"
    echo "no text was found on this machine; name one: examples/run.sh --text FILE" >&2
    exit 2
fi
mv "$text.new" "$text"
echo "$files text files of this machine (manuals, licences, headers), $(wc -c <"$text") bytes; the King James Bible was not to be had"
