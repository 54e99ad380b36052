// The rules for text files: which files are refused, and where documents start and end.
// data/prepare.py follows the same rules. Also, how to quote a file's name in a command that the
// user is told to run.
#pragma once
#include <string>
#include <vector>

constexpr char kEndOfTextPiece[] = "<|endoftext|>";

// Throws Error if this is not text: if it starts like a known binary format or contains a zero
// byte.
void check_is_text(const std::string& text, const std::string& path);

// The documents of a text file, which are separated by <|endoftext|>. A separator includes one line
// end (\n or \r\n) on each side of it. A byte order mark at the start of the file is dropped, and
// so are documents that consist of white space. Nothing else is changed.
std::vector<std::string> documents(const std::string& text);

std::vector<std::string> split(const std::string& text, const std::string& separator);

// The text as a single word of a shell command.
std::string shell_quoted(const std::string& text);
// A path as the value of an option, where it must not look like an option itself.
std::string shell_quoted_path(const std::string& path);
// The glob pattern that matches only this path.
std::string glob_escaped(const std::string& path);
