// Reads the grammar's notation into tables, and writes texts from them.
#include "data/grammar.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "common/error.h"
#include "common/random.h"

namespace {

bool is_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

char to_lower(char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

char to_upper(char c) {
    return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
}

// The index of the rule or variable with this name, −1 if there is none.
template <class Named>
int find(const std::vector<Named>& all, const std::string& name) {
    for (size_t i = 0; i < all.size(); i++) {
        if (all[i].name == name)
            return static_cast<int>(i);
    }
    return -1;
}

// -------------------------------------------------------------------------------------------------
// Reading the notation

// Whether a literal ends in the word "a" and a blank: an article that may have to become "an".
bool ends_in_article(const std::string& literal) {
    const size_t n = literal.size();
    if (n < 2 || literal[n - 1] != ' ' || to_lower(literal[n - 2]) != 'a')
        return false;
    return n == 2 || !is_name(literal[n - 3]);
}

class Reader {
  public:
    Reader(Grammar& grammar, const std::string& source) : g_(grammar) {
        split_lines(source);
        // Rules and variables can be used before they are defined, so headers and bindings are read
        // first.
        for_each_line(&Reader::read_header);
        for_each_line(&Reader::read_bindings);
        for_each_line(&Reader::read_alternatives);
        for (const Rule& rule : g_.rules) {
            if (rule.alternatives.empty())
                throw Error("grammar: rule " + rule.name + " has no alternatives");
        }
    }

  private:
    enum class Form { list, rule, table, unknown };

    Grammar& g_;
    std::vector<std::string> lines_;
    std::string line_;  // the line that is being read
    size_t at_ = 0;     // the position in it
    // The rule whose header was read last. Headers are read first, so rules with a name come first
    // in g_.rules, in the order of their headers; choices written in place follow.
    int rule_ = -1;
    Form form_ = Form::unknown;  // its form

    [[noreturn]] void fail(const std::string& what) const {
        throw Error("grammar: " + what + " in \"" + line_.substr(0, 80) + "\"");
    }

    // A line that starts with blanks continues the one before.
    void split_lines(const std::string& source) {
        lines_.emplace_back();
        std::istringstream in(source);
        for (std::string line; std::getline(in, line);) {
            if (line[0] == ' ') {
                line.erase(0, line.find_first_not_of(' '));
                lines_.back() += " " + line;
            } else {
                lines_.push_back(line);
            }
        }
    }

    void for_each_line(void (Reader::*read)()) {
        for (const std::string& line : lines_) {
            const bool is_comment = line[0] == '#';
            if (line.empty() || is_comment)
                continue;
            line_ = line;
            at_ = 0;
            (this->*read)();
        }
    }

    // Moves past `text` if that is next.
    bool skip(const std::string& text) {
        if (line_.compare(at_, text.size(), text) != 0)
            return false;
        at_ += text.size();
        return true;
    }

    std::string read_name() {
        const size_t begin = at_;
        while (is_name(line_[at_])) {
            at_++;
        }
        return line_.substr(begin, at_ - begin);
    }

    Form read_form() {
        const std::string word = read_name();
        if (word == "list")
            return Form::list;
        if (word == "rule")
            return Form::rule;
        return word == "table" ? Form::table : Form::unknown;
    }

    // @list name, @rule name or @table name: column, column
    void read_header() {
        if (!skip("@"))
            return;
        const Form form = read_form();
        const std::string name = skip(" ") ? read_name() : "";
        std::vector<std::string> columns;
        while (skip(": ") || skip(", ")) {
            columns.push_back(read_name());
        }

        const bool has_columns = !columns.empty();
        if (form == Form::unknown || name.empty() || at_ < line_.size() ||
            has_columns != (form == Form::table))
            fail("bad header");
        if (g_.rule(name) >= 0)
            fail("second definition");
        if (!has_columns)
            columns = {""};
        g_.rules.push_back({.name = name, .columns = columns, .alternatives = {}});
    }

    // Every slot {name:rule} binds a variable to a rule.
    void read_bindings() {
        for (;;) {
            at_ = line_.find('{', at_);
            if (at_ == std::string::npos)
                return;
            at_++;
            std::string name = read_name();
            if (!skip(":"))
                continue;
            name[0] = to_lower(name[0]);  // {Hero:person} remembers its row as hero, too
            const std::string rule = read_name();
            if (find(g_.variables, name) < 0)
                g_.variables.push_back({.name = name, .rule = g_.rule(rule)});
        }
    }

    void read_alternatives() {
        if (skip("@")) {
            rule_++;
            form_ = read_form();
            return;
        }
        if (rule_ < 0)
            fail("no header yet");
        if (form_ == Form::rule)
            read_weighted();
        else
            read_rows();
    }

    void add_alternative(uint64_t weight, const std::vector<Template>& columns) {
        g_.rules[rule_].alternatives.push_back({.weight = weight, .columns = columns});
    }

    // A line of a rule: its weight and the text.
    void read_weighted() {
        const int weight = std::atoi(line_.c_str());
        const size_t blank = line_.find(' ');
        if (weight < 1 || blank == std::string::npos)
            fail("no weight");
        at_ = blank + 1;
        add_alternative(static_cast<uint64_t>(weight), {read_template("")});
    }

    // A line of a table: first columns separated by "/", which share the other columns. A line of a
    // list is the same with one column and ",".
    void read_rows() {
        const std::string separator = form_ == Form::list ? "," : "/";
        std::vector<Template> firsts;
        do {
            firsts.push_back(read_part(separator + "|"));
        } while (skip(separator));

        std::vector<Template> columns(1);  // columns[0] will be each of firsts in turn
        while (skip("|")) {
            columns.push_back(read_part("|"));
        }
        if (columns.size() != g_.rules[rule_].columns.size())
            fail("wrong number of columns");

        for (const Template& first : firsts) {
            if (first.empty())
                continue;  // what follows the comma at the end of a list's line
            columns[0] = first;
            add_alternative(1, columns);
        }
    }

    // Reads up to one of the `stop` characters, which is not read, or to the end of the line.
    Template read_template(const std::string& stop) {
        Template t;
        std::string literal;
        const auto finish_literal = [&] {
            if (!literal.empty())
                t.push_back({.kind = Symbol::text, .literal = literal});
            literal.clear();
        };

        while (at_ < line_.size() && stop.find(line_[at_]) == std::string::npos) {
            const char c = line_[at_];
            if (skip(" ¶ ")) {
                literal += '\n';
            } else if (c == '{' || c == '(' || c == '[') {
                const bool article = ends_in_article(literal);
                if (article)
                    literal.pop_back();  // the blank: the Writer adds " " or "n "
                finish_literal();
                t.push_back(read_symbol());
                t.back().article = article;
            } else {
                literal += c;
                at_++;
            }
        }
        finish_literal();
        return t;
    }

    // The same of a part of a line, without the blanks around it.
    Template read_part(const std::string& stop) {
        while (line_[at_] == ' ') {
            at_++;
        }
        Template t = read_template(stop);
        if (t.empty() || t.back().kind != Symbol::text)
            return t;
        std::string& literal = t.back().literal;
        literal.erase(literal.find_last_not_of(' ') + 1);
        if (literal.empty())
            t.pop_back();
        return t;
    }

    // The same within brackets, which must be closed in this line.
    Template read_bracketed(const std::string& stop) {
        const Template t = read_template(stop);
        if (at_ >= line_.size())
            fail("no closing " + stop);
        return t;
    }

    Symbol read_symbol() {
        const char bracket = line_[at_];
        at_++;
        if (bracket == '{')
            return read_slot();
        if (bracket == '(')
            return read_choice();
        return read_option();
    }

    // A choice written in place is a rule without a name.
    Symbol choice_of(const std::vector<Alternative>& alternatives) {
        g_.rules.push_back({.name = "", .columns = {""}, .alternatives = alternatives});
        return {.kind = Symbol::choose, .rule = static_cast<int>(g_.rules.size()) - 1};
    }

    Symbol read_choice() {  // (one|two)
        std::vector<Alternative> alternatives;
        do {
            alternatives.push_back({.weight = 1, .columns = {read_bracketed("|)")}});
        } while (skip("|"));
        at_++;  // the closing bracket
        return choice_of(alternatives);
    }

    Symbol read_option() {  // [30% text ]
        const int percent = std::atoi(line_.c_str() + at_);
        const size_t sign = line_.find("% ", at_);
        if (percent < 1 || percent > 99 || sign == std::string::npos)
            fail("an option without its percentage");
        at_ = sign + 2;
        const Template text = read_bracketed("]");
        at_++;  // the closing bracket
        const Template nothing;
        return choice_of({{.weight = static_cast<uint64_t>(percent), .columns = {text}},
                          {.weight = static_cast<uint64_t>(100 - percent), .columns = {nothing}}});
    }

    Symbol read_slot() {  // {Name}, {name.column}, {name:rule.column!other}
        std::string name = read_name();
        const std::string rule = skip(":") ? read_name() : "";
        const std::string column = skip(".") ? read_name() : "";
        std::vector<int> others;
        while (skip("!")) {
            others.push_back(find(g_.variables, read_name()));
        }
        if (!skip("}") || name.empty())
            fail("bad slot");

        Symbol s = {.kind = Symbol::choose, .others = others};
        s.capital = std::isupper(static_cast<unsigned char>(name[0])) != 0;
        name[0] = to_lower(name[0]);

        // The name is a variable's if read_bindings() has found a {name:rule}, else a rule's.
        s.variable = find(g_.variables, name);
        const bool is_variable = s.variable >= 0;
        s.rule = is_variable ? g_.variables[s.variable].rule : g_.rule(name);

        // {variable:rule} chooses a row; {variable} and {variable.column} use the one chosen last.
        const bool is_binding = !rule.empty();
        if (is_variable && !is_binding)
            s.kind = column.empty() ? Symbol::repeat : Symbol::recall;

        if (s.rule < 0)
            fail("no rule " + (is_binding ? rule : name));
        if (is_binding && g_.rule(rule) != s.rule)
            fail("bad binding of " + name);
        if (!column.empty())
            s.column = column_index(s.rule, column);
        for (const int other : others) {
            if (other < 0 || g_.variables[other].rule != s.rule)
                fail("the name after ! remembers no row of it");
        }
        return s;
    }

    int column_index(int rule, const std::string& column) const {
        const std::vector<std::string>& columns = g_.rules[rule].columns;
        const auto found = std::find(columns.begin(), columns.end(), column);
        if (found == columns.end())
            fail("no column " + column);
        return static_cast<int>(found - columns.begin());
    }
};

// -------------------------------------------------------------------------------------------------
// Writing a text

class Writer {
  public:
    Writer(const Grammar& grammar, uint64_t seed, uint64_t index)
        : g_(grammar), state_(mix64(mix64(seed) + index)), memory_(grammar.variables.size()) {}

    std::string choose(const Symbol& s) {
        const Alternative& chosen = draw(s);
        const std::string text = write(chosen.columns[s.column]);
        if (s.variable >= 0)
            memory_[s.variable] = {.row = &chosen, .text = text};
        return text;
    }

  private:
    struct Memory {
        const Alternative* row = nullptr;
        std::string text = {};
    };

    const Grammar& g_;
    uint64_t state_;              // SplitMix64's
    std::vector<Memory> memory_;  // by variable

    // A random number below n. It is off uniform by less than n/2⁶⁴.
    uint64_t random_below(uint64_t n) {
        state_ += kGolden;
        const auto product = static_cast<unsigned __int128>(mix64(state_)) * n;
        return static_cast<uint64_t>(product >> 64);
    }

    uint64_t weight(const Alternative& a, const std::vector<int>& others) const {
        for (const int other : others) {
            if (remembered(other).row == &a)
                return 0;
        }
        return a.weight;
    }

    const Alternative& draw(const Symbol& s) {
        const std::vector<Alternative>& alternatives = g_.rules[s.rule].alternatives;
        uint64_t total = 0;
        for (const Alternative& a : alternatives) {
            total += weight(a, s.others);
        }
        if (total == 0)
            fail_without_rows(s);

        uint64_t left = random_below(total);
        size_t i = 0;
        while (left >= weight(alternatives[i], s.others)) {
            left -= weight(alternatives[i], s.others);
            i++;
        }
        return alternatives[i];
    }

    [[noreturn]] void fail_without_rows(const Symbol& s) const {
        std::string excluded;
        for (const int other : s.others) {
            excluded += "!" + g_.variables[other].name;
        }
        throw Error("grammar: " + excluded + " leaves no row of " + g_.rules[s.rule].name);
    }

    const Memory& remembered(int variable) const {
        if (!memory_[variable].row)
            throw Error("grammar: " + g_.variables[variable].name + " is not chosen yet");
        return memory_[variable];
    }

    std::string write(const Symbol& s) {
        switch (s.kind) {
            case Symbol::text: return s.literal;
            case Symbol::repeat: return remembered(s.variable).text;
            case Symbol::recall: return write(remembered(s.variable).row->columns[s.column]);
            default: return choose(s);
        }
    }

    std::string write(const Template& t) {
        std::string out;
        for (const Symbol& s : t) {
            std::string piece = write(s);
            if (piece.empty())
                continue;  // an option that was not taken
            if (s.article)
                out += std::strchr("aeiouAEIOU", piece[0]) ? "n " : " ";
            if (s.capital)
                piece[0] = to_upper(piece[0]);
            out += piece;
        }
        return out;
    }
};

}  // namespace

Grammar::Grammar(const std::string& source) {
    Reader(*this, source);
}

int Grammar::rule(const std::string& name) const {
    return find(rules, name);
}

std::string Grammar::write(int rule, uint64_t seed, uint64_t index) const {
    return Writer(*this, seed, index).choose({.kind = Symbol::choose, .rule = rule});
}
