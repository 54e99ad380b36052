// What a text file means: which files are none, and where its documents begin and end.
// data/prepare.py reads text by the same rules. Also how a name is written in a command that a user
// will paste.
#pragma once
#include <string>
#include <vector>

constexpr char kEndOfTextPiece[] = "<|endoftext|>";

// Throws Error if this is no text: a known format's first bytes, or a zero byte anywhere.
void check_is_text(const std::string& text, const std::string& path);

// The documents of a text file, which <|endoftext|> separates. One line end on each side of it (\n
// or \r\n) belongs to it, and a byte order mark at the file's beginning to none. Documents of white
// space alone are skipped. Nothing else changes.
std::vector<std::string> documents(const std::string& text);

std::vector<std::string> split(const std::string& text, const std::string& separator);

std::string shell_quoted(const std::string& text);  // one word of a shell's command line
// The same of a path behind an option, where it must not look like an option itself.
std::string shell_quoted_path(const std::string& path);
std::string glob_escaped(const std::string& path);  // the pattern that only this path matches
