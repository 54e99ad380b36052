// Parsing, help and settings from one table of options.
#include "run/options.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/error.h"
#include "data/text.h"

namespace {

std::string value_text(const Option& option) {
    switch (option.kind) {
        case Option::Int: return std::to_string(*static_cast<const int*>(option.value));
        case Option::Float:
            return format("%g", static_cast<double>(*static_cast<const float*>(option.value)));
        case Option::Flag: return *static_cast<const bool*>(option.value) ? "on" : "off";
        default: return *static_cast<const std::string*>(option.value);
    }
}

Option* find_option(std::vector<Option>& table, const std::string& name) {
    for (Option& option : table)
        if (name == option.name || (*option.letter && name == option.letter))
            return &option;
    return nullptr;
}

// A range has one or more pieces with " or " between them. A piece is a number or "low..high",
// either end of which may be missing.
bool in_range(double value, const std::string& range) {
    for (const std::string& piece : split(range, " or ")) {
        const size_t dots = piece.find("..");
        const std::string low = piece.substr(0, dots);
        const std::string high = dots == std::string::npos ? low : piece.substr(dots + 2);
        const bool above = low.empty() || value >= std::stod(low);
        const bool below = high.empty() || value <= std::stod(high);
        if (above && below)
            return true;
    }
    return false;
}

// Throws a UsageError, "--batch (-b): "x" is not an integer", unless the value is good.
void check_value(const Option& option, const std::string& text, bool good,
                 const std::string& otherwise) {
    if (!good)
        throw UsageError(
            format("%s: \"%s\" %s", title(option).c_str(), text.c_str(), otherwise.c_str()));
}

// Parses an Int or a Float, and checks its range.
double number(const Option& option, const std::string& text) {
    const bool is_int = option.kind == Option::Int;
    const std::string range = option.range;
    char* end = nullptr;
    errno = 0;
    const double value = std::strtod(text.c_str(), &end);
    // 1e-400 is 0 as a double, 1e-60 as a float. A 0 that was typed is no underflow.
    const bool underflows = value == 0 ? errno == ERANGE : static_cast<float>(value) == 0;
    const bool is_number =
        !text.empty() && end == text.c_str() + text.size() && !std::isspace(text[0] & 0xFF);
    const bool only_digits = text.find_first_not_of("-0123456789") == std::string::npos;

    check_value(option, text, is_number && (only_digits || !is_int),
                is_int ? "is not an integer" : "is not a finite number");
    check_value(option, text, std::isfinite(static_cast<float>(value)), "is not a finite number");
    check_value(option, text, in_range(value, range) && (!is_int || std::fabs(value) <= INT_MAX),
                "is out of range " + range);
    check_value(option, text, !underflows, "is too small: as a float it would be 0");
    return value;
}

void set_value(Option& option, const std::string& text) {
    switch (option.kind) {
        case Option::Int:
            *static_cast<int*>(option.value) = static_cast<int>(number(option, text));
            break;
        case Option::Float:
            number(option, text);  // only for its checks: it parses a double
            *static_cast<float*>(option.value) = std::strtof(text.c_str(), nullptr);
            break;
        case Option::Choice: {
            const std::string range = option.range;
            const std::vector<std::string> choices = split(range, "|");
            const bool known = std::find(choices.begin(), choices.end(), text) != choices.end();
            check_value(option, text, known, "is not one of " + range);
            *static_cast<std::string*>(option.value) = text;
            break;
        }
        case Option::Path:
            check_value(option, text, !text.empty(), "is not a path");
            *static_cast<std::string*>(option.value) = text;
            break;
        case Option::String: *static_cast<std::string*>(option.value) = text; break;
        case Option::Flag:
            check_value(option, text, text == "0" || text == "1", "is not 0 or 1");
            *static_cast<bool*>(option.value) = text == "1";
            break;
    }
    option.given = option.kind != Option::Flag || text == "1";
}

// If the word names a file, the shell may have made several words of a pattern, the first of which
// was an option's value.
[[noreturn]] void fail_unknown(const std::string& word) {
    const bool is_file = !word.starts_with('-') && access(word.c_str(), F_OK) == 0;
    throw UsageError(format("unknown option %s; see --help (llm.c's options: FROM_LLMC.md)%s",
                            word.c_str(),
                            is_file ? ", and put a pattern of file names in quotes" : ""));
}

// The first column of --help: "  -b,  --batch N". Options without a letter are indented to line up.
std::string usage_of(const Option& option) {
    const char* argument = "";
    switch (option.kind) {
        case Option::Int: argument = " N"; break;
        case Option::Float: argument = " X"; break;
        case Option::String: argument = " TEXT"; break;
        case Option::Path: argument = " PATH"; break;
        case Option::Choice: argument = " NAME"; break;
        case Option::Flag: break;
    }
    const std::string letter = *option.letter ? std::string(option.letter) + "," : "";
    return format("  %-4s %s%s", letter.c_str(), option.name, argument);
}

// The second column of --help: the help text and, in parentheses, range and default. Both are left
// out if the text explains the default, except that a Choice always lists its names. A range
// without an upper end says little, so it is left out, too.
std::string help_with_notes(const Option& option) {
    const std::string range = option.range;
    const bool default_in_text = std::strstr(option.help, "default: ");
    const bool endless = !range.empty() && range.back() == '.';
    std::string notes;
    if (!endless && (!default_in_text || option.kind == Option::Choice))
        notes = range;
    std::string value = default_in_text ? "" : value_text(option);
    if (option.kind == Option::Flag && value == "off")
        value = "";
    if (!value.empty())
        notes += (notes.empty() ? "default " : "; default ") + value;
    return notes.empty() ? option.help : format("%s (%s)", option.help, notes.c_str());
}

}  // namespace

std::string title(const Option& option) {
    return *option.letter ? format("%s (%s)", option.name, option.letter) : option.name;
}

Parsed parse_options(int argc, const char* const* argv, std::vector<Option>& table) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    const auto is_flag_value = [&](size_t i) {
        return i < args.size() && (args[i] == "0" || args[i] == "1");
    };
    const auto is_option = [&](size_t i) {
        return find_option(table, args[i].substr(0, args[i].find('='))) != nullptr;
    };

    std::vector<const Option*> given;
    for (size_t i = 0; i < args.size(); i++) {
        if (args[i] == "--help" || (args[i] == "-h" && !is_flag_value(i + 1)))
            return Parsed::help;
        const size_t equals = args[i][0] == '-' ? args[i].find('=') : std::string::npos;
        const bool has_value = equals != std::string::npos;
        const std::string name = args[i].substr(0, equals);
        Option* option = find_option(table, name);
        if (!option)
            fail_unknown(name);
        if (std::find(given.begin(), given.end(), option) != given.end())
            throw UsageError(
                format("%s is given twice; leave out one of them", title(*option).c_str()));
        given.push_back(option);

        std::string value = "1";
        if (has_value) {
            value = args[i].substr(equals + 1);
        } else if (option->kind == Option::Flag) {
            if (is_flag_value(i + 1)) {
                i++;
                value = args[i];
            }
        } else {
            // The name of another option means that this one's value was forgotten. "-1" is a
            // value.
            i++;
            if (i == args.size() || is_option(i))
                throw UsageError(format("%s needs a value", title(*option).c_str()));
            value = args[i];
        }
        set_value(*option, value);
    }
    return Parsed::options;
}

std::string options_help(const std::string& program, const std::string& about,
                         const std::vector<Option>& table) {
    constexpr size_t kHelpWidth = 110;  // columns
    size_t width = 0;                   // of the first column
    for (const Option& option : table)
        width = std::max(width, usage_of(option).size() + 2);

    std::string text = "usage: " + program + " [options]\n\n" + about + "\n";
    for (const Option& option : table) {
        if (*option.group)
            text += format("\n%s\n", option.group);
        std::string line = usage_of(option);
        line.resize(width - 1, ' ');
        for (const std::string& word : split(help_with_notes(option), " ")) {
            if (line.size() + 1 + word.size() > kHelpWidth) {
                text += line + "\n";
                line.assign(width - 1, ' ');
            }
            line += " " + word;
        }
        text += line + "\n";
    }
    return text;
}

Fields options_settings(const std::vector<Option>& table) {
    Fields settings;
    for (const Option& option : table)
        if (const std::string value = value_text(option); !value.empty())
            settings.push_back({option.name, value});
    return settings;
}

std::string options_changed(const std::vector<Option>& table, const std::vector<Option>& defaults) {
    std::string text;
    std::string group;  // to be printed before its first changed option
    for (size_t i = 0; i < table.size(); i++) {
        const Option& option = table[i];
        if (*option.group)
            group = option.group;
        const std::string value = value_text(option);
        if (value == value_text(defaults[i]))
            continue;

        if (!group.empty())
            text += format("%s%-17s", text.empty() ? "" : "\n", group.c_str());
        group.clear();
        text += format("  %s", option.name);
        if (option.kind != Option::Flag)
            text += " " + shell_quoted(value);
    }
    return text + "\n";
}
